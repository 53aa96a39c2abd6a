"""REINFORCE Leave-One-Out from scratch: the whole method in one file, to be read from top to bottom.

A tiny llama is asked to sort five digits: after the prompt "7 3 1 5 0 >" it should write "0 1 3 5 7" and
stop. We show it a few right answers first, so that it is right now and then; from then on it learns only
from a reward: 1 for a right answer, 0 for anything else. Nobody tells it what to write instead.

    python examples/rloo_from_scratch.py --steps 150 --seed 0

About 40 seconds on one CPU core. It needs torch and transformers; nothing is downloaded.
"""

import argparse
import copy
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

# ---
# 1. The task. Tokens 0 to 9 are the digits themselves; three more are needed.

ARROW, EOS, PAD, VOCABULARY = 10, 11, 12, 13
NUM_DIGITS = 5
MAX_COMPLETION = NUM_DIGITS + 2  # the answer, EOS, and one too many: a wrong length must be possible


def make_prompts(digits: Tensor) -> Tensor:
    """(P, NUM_DIGITS) → (P, NUM_DIGITS + 1): the digits, then the arrow that asks for the answer."""
    return F.pad(digits, (0, 1), value=ARROW)


def make_answers(digits: Tensor) -> Tensor:
    """(P, NUM_DIGITS) → (P, NUM_DIGITS + 1): the digits in order, then EOS: stopping is part of it."""
    return F.pad(digits.sort(dim=1).values, (0, 1), value=EOS)


def score(completions: Tensor, answers: Tensor) -> Tensor:
    """(N, T) completions and their answers → (N,): 1.0 where every token is right, else 0.0."""
    answers = F.pad(answers, (0, completions.shape[1] - answers.shape[1]), value=PAD)
    return (completions == answers).all(dim=1).float()


# ---
# 2. The policy: the model in training. It starts from random weights and a short supervised warm-up, because
#    a policy that is never right never sees a reward, and there is nothing to reinforce.


def make_policy() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def warm_up(policy: LlamaForCausalLM, digits: Tensor, steps: int) -> None:
    """Ordinary next-token training on the right answers, stopped long before it is good."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for _ in range(steps):
        batch = digits[torch.randperm(len(digits))[:64]]
        prompts, answers = make_prompts(batch), make_answers(batch)
        logits = policy(torch.cat([prompts, answers], dim=1)).logits
        # Logits at position t are about token t + 1: those about the answer begin at the prompt's last token.
        logits = logits[:, prompts.shape[1] - 1 : -1]
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def sample(policy: LlamaForCausalLM, prompts: Tensor, greedy: bool = False) -> Tensor:
    """One completion for each row of prompts: (N, T_prompt) → (N, MAX_COMPLETION), PAD after EOS.

    Temperature 1, no top-k, no top-p: this is the policy's own distribution, which the gradient is about.
    """
    how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "top_p": 1.0}
    mask = torch.ones_like(prompts)
    sequences = policy.generate(prompts, attention_mask=mask, max_new_tokens=MAX_COMPLETION, **how)
    completions = sequences[:, prompts.shape[1] :]
    return F.pad(completions, (0, MAX_COMPLETION - completions.shape[1]), value=PAD)


def accuracy(policy: LlamaForCausalLM, digits: Tensor, greedy: bool = False) -> float:
    return score(sample(policy, make_prompts(digits), greedy), make_answers(digits)).mean().item()


# ---
# 3. The method.


def leave_one_out(rewards: Tensor) -> Tensor:
    """Rewards (P, K) of K completions for each of P prompts → their advantages (P, K).

    Was this completion good? That depends on the prompt: 0.5 is poor for an easy one, fine for a hard one. So
    each is compared with the mean reward of its K − 1 siblings, sampled for the very same prompt:

        advantage_i = reward_i − 1/(K−1) · Σ_{j≠i} reward_j

    It leaves itself out so that its baseline does not depend on it: then subtracting the baseline changes the
    gradient's noise and not its average. No value model has to be trained to guess the baseline.
    """
    k = rewards.shape[1]
    siblings = rewards.sum(dim=1, keepdim=True) - rewards
    return rewards - siblings / (k - 1)


def logprobs_of(model: LlamaForCausalLM, prompts: Tensor, completions: Tensor) -> tuple[Tensor, Tensor]:
    """log π(completion | prompt), summed over its tokens (N,), and the mean entropy per token.

    EOS is a token that the policy chose, and counts. The padding behind it is not.
    """
    logits = model(torch.cat([prompts, completions], dim=1)).logits[:, prompts.shape[1] - 1 : -1]
    logp = logits.log_softmax(dim=-1)  # (N, T, V)
    is_eos = (completions == EOS).long()
    chosen = is_eos.cumsum(dim=1) - is_eos == 0  # (N, T): up to and including the first EOS
    of_tokens = logp.gather(2, completions.unsqueeze(2)).squeeze(2)
    entropy = -(logp.exp() * logp).sum(dim=-1)
    return (of_tokens * chosen).sum(dim=1), (entropy * chosen).sum().detach() / chosen.sum()


def rloo_step(policy, reference, optimizer, digits: Tensor, k: int, beta: float) -> dict[str, float]:
    """One step: sample, score, compare, update."""
    # Sample K completions for each prompt. Rows 0 … K−1 belong to the first prompt, and so on.
    prompts = make_prompts(digits).repeat_interleave(k, dim=0)  # (P·K, T_prompt)
    completions = sample(policy, prompts)
    scores = score(completions, make_answers(digits).repeat_interleave(k, dim=0))

    # How likely did the policy find what it wrote, and how likely does the frozen reference find it?
    logprobs, entropy = logprobs_of(policy, prompts, completions)
    with torch.no_grad():
        reference_logprobs, _ = logprobs_of(reference, prompts, completions)

    # The penalty for leaving the reference is part of the reward. log π − log π_ref is the "k1" estimate of
    # the KL divergence: right on average, though it may be negative on one sample. It is a number here, not a
    # path for the gradient, hence the detach.
    kl = logprobs.detach() - reference_logprobs
    rewards = scores - beta * kl
    advantages = leave_one_out(rewards.view(-1, k)).flatten()

    # The policy gradient: make a completion likelier in proportion to its advantage (if negative, less so).
    # The loss is only a handle for its gradient, −mean(A · ∇ log π); its value says nothing about progress.
    loss = -(advantages * logprobs).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return {"reward": scores.mean().item(), "kl": kl.mean().item(), "entropy": entropy.item()}


# ---
# 4. The run.


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description="RLOO from scratch: a tiny llama learns to sort digits.")
    parser.add_argument("--steps", type=int, default=150, help="RLOO steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
    parser.add_argument("--k", type=int, default=8, help="completions per prompt, at least 2")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate, falling linearly to 0")
    parser.add_argument("--beta", type=float, default=0.02, help="weight of the KL penalty")
    parser.add_argument("--warm-up", type=int, default=35, help="supervised steps before RLOO")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    numbers = torch.randperm(10**NUM_DIGITS)  # every prompt once, so that held-out ones are never trained on
    digits = numbers.unsqueeze(1) // 10 ** torch.arange(NUM_DIGITS - 1, -1, -1) % 10
    held_out, train = digits[:512], digits[512:]

    policy = make_policy()
    warm_up(policy, train, args.warm_up)
    reference = copy.deepcopy(policy).eval()  # never updated: the anchor of the KL
    before = accuracy(policy, held_out)
    print(f"after the warm-up: {before:.0%} of sampled answers to held-out prompts are right")

    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(args.steps, 1))
    curve, start = [], time.perf_counter()
    for step in range(1, args.steps + 1):
        batch = train[torch.randperm(len(train))[: args.prompts]]
        curve.append(rloo_step(policy, reference, optimizer, batch, args.k, args.beta))
        schedule.step()
        if step % 10 == 0:
            mean = {name: sum(row[name] for row in curve[-10:]) / 10 for name in curve[-1]}
            shown = "   ".join(f"{name} {value:5.2f}" for name, value in mean.items())
            print(f"step {step:4d}   {shown}   {time.perf_counter() - start:4.0f} s")

    after, greedy = accuracy(policy, held_out), accuracy(policy, held_out, greedy=True)
    print(f"after {args.steps} steps of RLOO: {after:.0%} sampled, {greedy:.0%} greedy")
    return {"before": before, "after": after, "greedy": greedy, "curve": curve}


if __name__ == "__main__":
    main()
