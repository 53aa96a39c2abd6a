"""Train a model with a reward of your own.

    python examples/own_reward.py --model Qwen/Qwen2.5-0.5B-Instruct --output brief-qwen

The reward likes replies of about forty words that end in a full stop. Replace it with what you care about: it gets the
completions, whatever columns of the data it names, and returns one number each (None where it does not apply).
"""

from __future__ import annotations

import argparse

from rloom import RLOOConfig, RLOOTrainer

PROMPTS = [
    "Why is the sky blue?",
    "What does a compiler do?",
    "How do vaccines work?",
    "Explain recursion to a child.",
    "What makes bread rise?",
    "Why do we have leap years?",
    "How does a refrigerator cool?",
    "What is a prime number?",
]


def brief(completions: list, words: list[int], **kwargs: object) -> list[float]:
    """1 for a reply of just the wanted number of words, less for longer and shorter ones."""
    scores = []
    for reply, wanted in zip(completions, words, strict=True):
        text = reply[0]["content"] if isinstance(reply, list) else reply
        scores.append(max(0.0, 1.0 - abs(len(text.split()) - wanted) / wanted))
    return scores


def full_stop(completions: list, **kwargs: object) -> list[float]:
    """1 for a reply that ends as a sentence does."""
    texts = [reply[0]["content"] if isinstance(reply, list) else reply for reply in completions]
    return [float(text.rstrip().endswith((".", "!", "?"))) for text in texts]


def main(argv: list[str] | None = None) -> RLOOTrainer:
    """Train, save, and return the trainer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a name on the hub, or a path")
    parser.add_argument("--output", default="own-reward")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--max-completion-length", type=int, default=128)
    options = parser.parse_args(argv)

    rows = [{"prompt": [{"role": "user", "content": text}], "words": 40} for text in PROMPTS]
    config = RLOOConfig(
        options.output,
        max_steps=options.steps,
        num_generations=4,
        per_device_train_batch_size=16,
        max_completion_length=options.max_completion_length,
        learning_rate=1e-6,
        beta=0.05,
        reward_weights=[1.0, 0.2],
        missing_eos_penalty=1.0,
        log_completions=True,
        num_completions_to_print=3,
        logging_steps=5,
        report_to="none",
    )
    trainer = RLOOTrainer(options.model, [brief, full_stop], config, rows)
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
