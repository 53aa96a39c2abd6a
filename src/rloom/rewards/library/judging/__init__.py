"""A judge as a reward: a language model behind an OpenAI-compatible address, or a reward model."""
