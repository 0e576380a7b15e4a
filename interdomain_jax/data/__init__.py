"""Text corpora, tokenizers, and the grain pipeline from documents to training batches.

* `sources`, `stdlib_text`, `text_files`: where texts come from, TFDS builders that can be read part by part.
* `documents`, `tokenizers`: the rules that a text goes through, and its ids.
* `preparation`, `token_files`, and the program `prepare`: from a source to files of ids, shard by shard, on Beam.
* `rows`, `windows`, `loader`: which tokens make up a row, the rows, and the batches for training and evaluation.
* `contexts`: a corpus to score, as contexts that are read whole or in pieces.
* `corpora`: the corpora that a config names.
* the programs `train_tokenizer` and `inspect`.
"""

SPLITS = ("train", "validation")
