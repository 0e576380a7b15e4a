"""Recall tasks that are made here, each a function of a seed in NumPy alone.

* Of tokens, for models trained on them: `mqar`, `selective_copying`, `induction_heads`; `sequences` is what they give.
* Of text, for trained language models, in a budget of tokens: `needle`, `phonebook`; `questions` is what they give.
"""
