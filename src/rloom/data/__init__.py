"""Where prompts come from and in which order: formats, chat templates, the plan of updates."""
