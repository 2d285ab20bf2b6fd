"""What the heads of a language model do as inputs grow: the programs `whet-probe` and `whet-tune`.

`whet probe` runs `whet-probe`, `whet tune` runs `whet-tune`. Both need ``pip install 'whet[probe]'``. The parts can
be called from Python too:

====================  ===================================================================================
whet.probe.models     load a model: a folder, a name in the local cache, a .gguf file
whet.probe.prompts    prompts of about as many tokens as asked
whet.probe.measure    statistics of attention for each prompt, kept in a folder as they come
whet.probe.analysis   means, growth of the entropy, horizon and class of every head
whet.probe.advise     whether sharpening helps: loss on a text and recall of a pass key under several rules
whet.probe.tune       a rule for each head
====================  ===================================================================================
"""
