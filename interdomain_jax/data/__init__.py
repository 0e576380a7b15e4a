"""Text corpora, tokenizers, and the grain pipeline from documents to training batches.

* `tokenizers`: text to token ids, behind one small interface.
* `stdlib_text`: the default corpus, which needs no download.
* `packing`: documents to fixed-length windows, with exactly restorable state.
* `loader`: training and evaluation batches.
"""
