"""The paper's second experiment: a decoder on CLRS-Text, its heads sharpened in training, at test or both.

The program is `whet-clrs`. From Python:

    from whet.clrs import data, model, tokens          # problems, a decoder, a vocabulary
    from whet.clrs.training import Recipe, train       # a run in a folder
    from whet.clrs.evaluation import Plan, evaluate    # exact match at every size, under any rule

torch is imported where it is needed only, and the generator's libraries in processes of their own.
"""
