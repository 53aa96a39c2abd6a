"""Ready-made reward functions.

`accuracy` (right answers), `form` (formats), `size` (lengths), `text` (language, mood, references), `embeddings`
(meaning), `code` (programs against tests), `judging` (a judge). What they need from outside comes through `inputs`.
"""
