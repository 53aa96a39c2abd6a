"""A judge as a reward: a language model behind an OpenAI-compatible address, or a reward model.

`judge` is the reward function, `judge_client` asks the model, `replies` reads what it says, `reply_cache` keeps it.
"""
