"""Recall tasks that are made here, each a function of a seed in NumPy alone, and how well a model does them.

* Of tokens, for models trained on them: `mqar`, `selective_copying`, `induction_heads`; `sequences` is what they give.
* Of text, for trained language models, in a budget of tokens: `needle`, `phonebook`; `questions` is what they give.
* `evaluate`: asks them of a checkpoint; `accuracy`: of a model in memory.
"""
