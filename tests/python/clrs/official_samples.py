"""Prints, as JSON, problems made by dm-clrs's own generator function, with a stand-in for TensorFlow.

    python official_samples.py SIZE SAMPLES SEED
"""

import importlib
import importlib.util
import json
import logging
import sys
import types

root = importlib.util.find_spec("clrs").submodule_search_locations[0]
for name, folder in (("clrs", root), ("clrs._src.clrs_text", f"{root}/_src/clrs_text")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
if importlib.util.find_spec("tensorflow") is None:
    sys.modules["tensorflow"] = types.SimpleNamespace(Tensor=type("Tensor", (), {}))

generators = importlib.import_module("clrs._src.clrs_text.huggingface_generators")
specs = importlib.import_module("clrs._src.specs")
logging.getLogger("absl").setLevel(logging.ERROR)
size, samples, seed = map(int, sys.argv[1:])
found = {}
for algorithm in specs.CLRS_30_ALGS:
    for hints in (False, True):
        made = generators.clrs_generator({algorithm: [size]}, samples, hints, seed)
        found[f"{algorithm} {hints}"] = [[one["question"], one["answer"]] for one in made]
json.dump(found, sys.stdout)
