"""Mutants: one changed line each, and the test that must notice it.

A mutant is (file under src/rloom, text that occurs in it exactly once, replacement, test). A text that is no longer
found is an error of this table, and not a mutant that was killed. Where a test is one of the oracle's draws, any other
that reaches the line would do; `make mutants` says when it no longer does.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "src/rloom"


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    text: str
    replacement: str
    test: str

    def applied(self, source: str) -> str:
        """The file with the change in it."""
        count = source.count(self.text)
        if count != 1:
            raise ValueError(f"{self.file}: the text of a mutant occurs {count} times, not once: {self.text!r}")
        return source.replace(self.text, self.replacement)

    def __str__(self) -> str:
        return f"{self.file}: {self.text.strip()!r} → {self.replacement.strip()!r}"


def draw(number: int) -> str:
    """A run of the oracle's."""
    return f"tests/parity/test_oracle.py::test_run_is_the_oracles[{number}]"


MUTANTS = [
    # algo
    Mutant("algo/kl.py", "    return policy - reference\n", "    return reference - policy\n", draw(29)),
    Mutant("algo/kl.py", "return (policy - reference).square() / 2", "return (policy - reference).square()", draw(14)),
    Mutant("algo/kl.py", "torch.expm1(-log_ratio) + log_ratio", "torch.expm1(log_ratio) - log_ratio", draw(30)),
    Mutant(
        "algo/advantages.py",
        "baseline = (total - filled) / (count - 1).clamp(min=1)",
        "baseline = total / count.clamp(min=1)",
        draw(184),
    ),
    Mutant(
        "algo/advantages.py",
        "variance = _group_sums(centred**2, groups) / (count - 1).clamp(min=1)",
        "variance = _group_sums(centred**2, groups) / count.clamp(min=1)",
        draw(228),
    ),
    Mutant("algo/advantages.py", "(_group_sums(known, groups) > 1)", "(_group_sums(known, groups) > 0)", draw(74)),
    Mutant(
        "algo/advantages.py", "filled.sum() / known.sum().clamp(min=1)) * known", "filled.mean()) * known", draw(26)
    ),
    Mutant(
        "algo/advantages.py",
        "self.value = self.momentum * baseline + (1 - self.momentum) * mean",
        "self.value = (1 - self.momentum) * baseline + self.momentum * mean",
        draw(29),
    ),
    Mutant("algo/advantages.py", "baseline = mean if self.value is None else self.value", "baseline = mean", draw(29)),
    Mutant("algo/advantages.py", "advantages.clamp(-limit, limit)", "advantages.clamp(max=limit)", draw(80)),
    Mutant(
        "algo/loss.py",
        "objective = torch.min(ratio * advantages,",
        "objective = torch.max(ratio * advantages,",
        draw(14),
    ),
    Mutant(
        "algo/loss.py",
        "ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages",
        "ratio.clamp(1 - epsilon_high, 1 + epsilon_low) * advantages",
        draw(14),
    ),
    Mutant(
        "algo/loss.py",
        "torch.where(advantages < 0, torch.max(objective, dual_clip * advantages), objective)",
        "torch.where(advantages > 0, torch.max(objective, dual_clip * advantages), objective)",
        draw(131),
    ),
    Mutant(
        "algo/loss.py",
        "low_clipped=(ratio < 1 - epsilon_low) & (advantages < 0)",
        "low_clipped=(ratio < 1 - epsilon_low) & (advantages > 0)",
        draw(14),
    ),
    Mutant("algo/loss.py", "values=-advantages * policy,", "values=-advantages * log_ratio.exp(),", draw(29)),
    Mutant(
        "algo/loss.py",
        "(values * lengths).sum() if aggregation.over_tokens else values.sum()",
        "values.sum()",
        draw(46),
    ),
    Mutant(
        "algo/loss.py",
        "        per_sequence = per_sequence / lengths.clamp(min=1)\n",
        "        per_sequence = per_sequence / lengths.max()\n",
        draw(101),
    ),
    Mutant("algo/normalizers.py", "((exact - masked_mean(exact)) / (std + eps))", "(exact / (std + eps))", draw(11)),
    Mutant(
        "algo/normalizers.py",
        "math.sqrt(self.squares / (self.count - 1)) if",
        "math.sqrt(self.squares / self.count) if",
        draw(11),
    ),
    Mutant("algo/normalizers.py", "delta**2 * self.count * count / total", "delta**2 * count / total", draw(11)),
    Mutant(
        "algo/shaping.py",
        "scores - penalty * (~ended).to(scores.dtype)",
        "scores - penalty * ended.to(scores.dtype)",
        draw(311),
    ),
    Mutant("algo/shaping.py", "return coefficient * lengths / max_length", "return coefficient * lengths", draw(74)),
    Mutant(
        "algo/shaping.py",
        "((lengths - (max_length - margin)) / margin).clamp(0, 1)",
        "((lengths - margin) / margin).clamp(0, 1)",
        draw(30),
    ),
    Mutant(
        "algo/shaping.py",
        "(rewards * mask).flip(-1).cumsum(-1).flip(-1) * mask",
        "(rewards * mask).cumsum(-1) * mask",
        draw(14),
    ),
    Mutant("algo/shaping.py", "total = (scores * weights).nansum(-1)", "total = scores.nansum(-1)", draw(14)),
    Mutant(
        "algo/objectives.py",
        '"verl": Objective(ratio_level="token", loss_aggregation="token_mean", dual_clip=3.0)',
        '"verl": Objective(ratio_level="token", loss_aggregation="sequence_mean", dual_clip=3.0)',
        draw(332),
    ),
    # data
    Mutant(
        "data/plan.py",
        "            for _ in range(self.passes)\n            for part in range(self.parts)\n",
        "            for part in range(self.parts)\n            for _ in range(self.passes)\n",
        draw(110),
    ),
    Mutant(
        "data/plan.py",
        'derive_seed(self.seed, "order", self.epoch)',
        'derive_seed(self.seed, "order")',
        "tests/unit/test_plan.py::test_the_order_depends_on_seed_and_epoch_alone",
    ),
    Mutant(
        "data/plan.py",
        "return -(-rollouts * self.parts * self.passes // self.parts_per_update)",
        "return rollouts * self.parts * self.passes // self.parts_per_update",
        draw(11),
    ),
    Mutant(
        "data/plan.py",
        "for _ in range(schedule.passes):\n            pending +=",
        "for _ in range(1):\n            pending +=",
        draw(311),
    ),
    Mutant("data/loader.py", "            epoch += 1\n", "            pass\n", draw(26)),
    Mutant(
        "data/batching.py",
        "batch.position_ids = upload((mask.cumsum(-1) - 1).clamp(min=0), device)",
        "batch.position_ids = upload(torch.arange(mask.shape[1]).expand_as(mask), device)",
        "tests/parity/test_architectures.py::test_packed_is_padded_is_plain[gpt2]",
    ),
    Mutant(
        "data/batching.py",
        "packed += own if groups[row] == group else length + own",
        "packed += own",
        "tests/unit/test_batching.py::test_plans_are_full_and_no_fuller",
    ),
    Mutant(
        "data/batching.py",
        "self.packed if packed else self.rows * (self.prompt + self.completion)",
        "self.packed",
        "tests/unit/test_batching.py::test_plans_are_full_and_no_fuller",
    ),
    Mutant(
        "data/packing.py",
        "spans += [(length, block.prompt) for block in blocks",
        "spans += [(length, 0) for block in blocks",
        draw(253),
    ),
    Mutant("data/packing.py", "source[begins[lengths > 0] - num_prompt_tokens] = last[lengths > 0]", "pass", draw(253)),
    Mutant("data/packing.py", "source = source[drawn]", "source = source[: int(drawn.sum())]", draw(7)),
    Mutant("data/batching.py", "else places[drawn]", "else places[: int(drawn.sum())]", draw(397)),
    Mutant(
        "training/learner.py",
        "trained * len(rollout.drawn_ids(row))",
        "trained * len(rollout.completion_ids[row])",
        draw(17),
    ),
    Mutant(
        "training/collector.py", "[c.num_drawn for group in groups", "[len(c.token_ids) for group in groups", draw(47)
    ),
    Mutant("types.py", "drawn_of(c.logprobs, c.mask)", "c.logprobs[: c.num_drawn]", draw(127)),
    Mutant("data/packing.py", "if runs and groups[rows[runs[-1][-1]]] == groups[row]:", "if runs:", draw(335)),
    # models
    Mutant(
        "models/head.py",
        "logits * (self.scale / self.temperature)",
        "logits * (self.scale * self.temperature)",
        draw(21),
    ),
    Mutant(
        "models/head.py", "return logits if self.scale == self.temperature else", "return logits if True else", draw(21)
    ),
    Mutant(
        "models/head.py",
        "entropy = lse - (z - lse.unsqueeze(-1)).exp().mul_(z).sum(-1)",
        "entropy = lse - (z - lse.unsqueeze(-1)).exp().mul_(z).mean(-1)",
        draw(14),
    ),
    Mutant("models/head.py", "return (p.exp() * (p - q)).sum(-1)", "return (q.exp() * (p - q)).sum(-1)", draw(21)),
    Mutant(
        "models/head.py",
        "q = reference.logits(theirs).log_softmax(-1)",
        "q = reference.logits(mine).log_softmax(-1)",
        draw(21),
    ),
    Mutant(
        "models/head.py",
        "dz.scatter_add_(1, targets.unsqueeze(-1), grad.unsqueeze(-1))",
        "dz.scatter_(1, targets.unsqueeze(-1), grad.unsqueeze(-1))",
        draw(14),
    ),
    Mutant(
        "models/head.py", "        factor = self.scale / self.temperature\n", "        factor = self.scale\n", draw(335)
    ),
    Mutant("models/block_attention.py", "seen = other <= own", "seen = other < own + 2", draw(253)),
    Mutant(
        "models/block_attention.py",
        "mask = _causal(width, block.prompt, window, q.device)",
        "mask = _causal(width, block.prompt, None, q.device)",
        "tests/parity/test_architectures.py::test_packed_is_padded_is_plain[mistral, window]",
    ),
    Mutant(
        "models/reference.py",
        "self.weights.move(policy.parameters(), alpha, value)",
        "self.weights.move(policy.parameters(), 1 - alpha, value)",
        draw(80),
    ),
    Mutant(
        "models/logprobs.py",
        "(keep - width - 1) + batch.places % width",
        "(keep - width) + batch.places % width",
        draw(14),
    ),
    Mutant(
        "models/load.py",
        "(isinstance(module, nn.Dropout) and module.p > 0)",
        "(isinstance(module, nn.Dropout) and module.p > 1)",
        draw(311),
    ),
    Mutant(
        "models/moving_average.py",
        "mine[piece].mul_(1 - alpha)",
        "mine[piece].mul_(alpha)",
        "tests/unit/test_moving_average.py::test_float32_weights_move_as_ever",
    ),
    # training
    Mutant(
        "training/learner.py",
        "loss = loss + self.assigner.credit.beta * aggregate(kl, mask, self.aggregation)",
        "loss = loss - self.assigner.credit.beta * aggregate(kl, mask, self.aggregation)",
        draw(21),
    ),
    Mutant(
        "training/learner.py",
        "return self.aux_loss_weight * share * aux_loss",
        "return -self.aux_loss_weight * share * aux_loss",
        draw(21),
    ),
    Mutant("training/learner.py", "share = batch.num_tokens / max(1, self.tokens_in_update)", "share = 1.0", draw(341)),
    Mutant(
        "training/learner.py",
        '"epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high,',
        '"epsilon_high": config.epsilon,',
        draw(14),
    ),
    Mutant(
        "training/learner.py",
        "completions += trained or self.config.truncation.counted",
        "completions += 1",
        draw(26),
    ),
    Mutant(
        "training/learner.py",
        "tokens += trained * len(rollout.drawn_ids(row))",
        "tokens += len(rollout.drawn_ids(row))",
        draw(21),
    ),
    Mutant("training/learner.py", "tokens if self.over_tokens else completions", "completions", draw(14)),
    Mutant(
        "training/learner.py",
        "old = stats.logprobs.detach() if batch.first else",
        "old = stats.logprobs.detach() if True else",
        draw(14),
    ),
    Mutant(
        "training/learner.py",
        "            total += self._untrained_loss(share)\n        return total\n\n    def _assign",
        "            total -= self._untrained_loss(share)\n        return total\n\n    def _assign",
        draw(11),
    ),
    Mutant(
        "training/learner.py",
        "self.update_metrics.skipped += len(rows) - len(kept)",
        "self.update_metrics.skipped += len(kept)",
        draw(11),
    ),
    Mutant(
        "training/learner.py",
        "self.update_metrics.policy_loss = self.update_metrics.policy_loss + loss\n",
        "self.update_metrics.policy_loss = self.update_metrics.policy_loss - loss\n",
        draw(11),
    ),
    Mutant(
        "training/learner.py",
        "if last is not None and last.rollout is share.rollout and last.rows.stop == share.rows.start:",
        "if last is not None and last.rollout is share.rollout:",
        "tests/unit/test_batching.py::test_only_neighbouring_shares_of_a_rollout_are_one",
    ),
    Mutant(
        "training/learner.py",
        "        self.policy.zero_grad(set_to_none=True)\n",
        "        pass\n",
        "tests/integration/test_memory.py::test_an_update_that_fails_in_its_backward_is_redone[options0-1]",
    ),
    Mutant(
        "training/learner.py",
        "        column[:] = values\n",
        "        pass\n",
        "tests/integration/test_learner_corners.py::test_out_of_memory_forgets_what_the_failed_attempt_drew",
    ),
    Mutant("training/learner.py", "keep(rollout.kl, batch, kl.detach())", "pass", draw(21)),
    Mutant(
        "training/assigner.py",
        "self._first_pass(model, rollout, keep_logprobs=True)",
        "self._first_pass(model, rollout, keep_logprobs=False)",
        draw(91),
    ),
    Mutant(
        "training/assigner.py",
        "if self.credit.needs_batch or (model.training and self._has_dropout):",
        "if self.credit.needs_batch:",
        draw(311),
    ),
    Mutant(
        "training/assigner.py",
        "if self.credit.needs_batch or (model.training",
        "if (model.training",
        "tests/integration/test_invariance.py::test_gradient_does_not_depend_on_the_split[moving average]",
    ),
    Mutant(
        "training/assigner.py",
        "            with evaluating(model):\n                stats = self.passes.run(model, batch)",
        "            if True:\n                stats = self.passes.run(model, batch)",
        draw(374),
    ),
    Mutant(
        "training/assigner.py",
        "self._set_advantages(rollout, range(len(rollout)), update=update)\n            if not whole",
        "self._set_advantages(rollout, range(len(rollout)))\n            if not whole",
        draw(1114),
    ),
    Mutant(
        "training/assigner.py",
        "self._set_advantages(rollout, range(len(rollout)), update=update)\n        return False",
        "self._set_advantages(rollout, range(len(rollout)))\n        return False",
        draw(1162),
    ),
    Mutant(
        "training/assigner.py",
        'self.metrics.add(mode, "mismatch/max", processes.max(difference))',
        'self.metrics.add(mode, "mismatch/max", processes.mean(difference))',
        draw(14),
    ),
    Mutant("training/assigner.py", "difference = (policy - engine).abs()", "difference = policy - engine", draw(14)),
    Mutant(
        "training/assigner.py",
        "members = torch.isin(rollout.groups, rollout.groups[torch.tensor(list(rows))])",
        "members = torch.isin(torch.arange(len(rollout)), torch.tensor(list(rows)))",
        draw(80),
    ),
    Mutant(
        "training/credit.py",
        "reward = score - self.beta * (kl * mask).sum(-1) if in_reward else score",
        "reward = score + self.beta * (kl * mask).sum(-1) if in_reward else score",
        draw(332),
    ),
    Mutant(
        "training/credit.py",
        "per_token = result.unsqueeze(-1) + charged - self.beta * to_go",
        "per_token = result.unsqueeze(-1) + charged + self.beta * to_go",
        draw(14),
    ),
    Mutant("training/credit.py", "if self.placement.before_baseline else 0.0", "if False else 0.0", draw(228)),
    Mutant(
        "algo/normalizers.py",
        "    if update:\n        moments.update(values)\n",
        "    moments.update(values)\n",
        draw(332),
    ),
    Mutant(
        "training/credit.py",
        '"margin": config.length_margin or max(1, limit // 5),',
        '"margin": max(1, limit // 5),',
        draw(21),
    ),
    Mutant(
        "training/credit.py",
        "        result = clip_advantages(result, self.advantage_clip)\n",
        "",
        draw(80),
    ),
    Mutant("training/credit.py", "        return clip(score, self.limits)\n", "        return score\n", draw(21)),
    Mutant(
        "training/credit.py",
        "self.average = MovingAverage(momentum=config.baseline_momentum)",
        "self.average = MovingAverage()",
        "tests/unit/test_credit.py::test_the_moving_average_goes_from_batch_to_batch_and_through_a_checkpoint",
    ),
    Mutant(
        "training/credit.py",
        '        self.average.value = state["value"]\n',
        "        pass\n",
        "tests/unit/test_credit.py::test_the_moving_average_goes_from_batch_to_batch_and_through_a_checkpoint",
    ),
    Mutant("training/collector.py", "if not self.truncation.counted:", "if False:", draw(139)),
    Mutant(
        "training/collector.py",
        "rollout.score = self.shaper(counted, lengths, ~truncated, scored.failed, update=False)",
        "rollout.score = self.shaper(counted, lengths, ~truncated, scored.failed, update=True)",
        draw(11),
    ),
    Mutant(
        "training/collector.py",
        "rollout.score = self.shaper.together(self.processes, counted, lengths, ~truncated, scored.failed)",
        "rollout.score = self.shaper.together(self.processes, counted, lengths, truncated, scored.failed)",
        draw(311),
    ),
    Mutant(
        "types.py",
        "(train_truncated or not c.truncated)",
        "True",
        draw(11),
    ),
    Mutant(
        "training/collector.py",
        'if mode == "train":\n            state.num_input_tokens_seen',
        "if True:\n            state.num_input_tokens_seen",
        draw(11),
    ),
    Mutant(
        "training/collector.py",
        "return sorted(groups, key=lambda group: position[id(group.prompt)])",
        "return groups",
        draw(139),
    ),
    Mutant(
        "training/dynamic_sampling.py",
        "record.group += before",
        "pass",
        "tests/unit/test_processes.py::test_all_take_part_in_rounds_of_replacement",
    ),
    Mutant(
        "training/collector.py",
        'return derive_seed(seed, "process", self.processes.rank) if self.processes.rank else seed',
        "return seed",
        "tests/unit/test_processes.py::test_processes_never_draw_the_same_noise_for_different_prompts[False]",
    ),
    Mutant(
        "training/rollout_metrics.py",
        'add("completions/clipped_ratio", (~self.ended).float().mean())',
        'add("completions/clipped_ratio", self.ended.float().mean())',
        draw(11),
    ),
    Mutant("training/rollout_metrics.py", "(missing + unscored) / self.asked", "unscored / self.asked", draw(30)),
    Mutant(
        "training/update_metrics.py",
        'metrics.add(mode, "clip_ratio/low_min", low.min())',
        'metrics.add(mode, "clip_ratio/low_min", low.max())',
        draw(14),
    ),
    Mutant("training/update_metrics.py", "/ mask.sum(-1).clamp(min=1)", "/ mask.shape[-1]", draw(156)),
    Mutant(
        "training/update_metrics.py",
        "self.entropy = self.entropy + (stats.entropy * mask).sum()",
        "self.entropy = (stats.entropy * mask).sum()",
        draw(14),
    ),
    Mutant(
        "training/trainer.py",
        'seed = derive_seed(self.args.seed, "train", *plan.key(number), 0)',
        'seed = derive_seed(42, "train", *plan.key(number), 0)',
        "tests/parity/test_oracle.py::test_seed_decides_prompts_and_noise",
    ),
    Mutant(
        "training/evaluating.py",
        'derive_seed(self.args.seed, "eval", 0, texts)',
        'derive_seed(self.args.seed, "eval", self.state.global_step, texts)',
        draw(11),
    ),
    Mutant(
        "training/learner.py",
        "whole=id(share.rollout) in whole, mode=mode",
        "whole=True, mode=mode",
        draw(91),
    ),
    Mutant("training/trainer.py", "        model.train()\n", "        model.eval()\n", draw(26)),
    Mutant(
        "training/trainer.py",
        "self._episodes += self.args.generation_batch_size",
        "self._episodes = self.args.generation_batch_size",
        draw(11),
    ),
    Mutant(
        "training/callbacks.py",
        "if state.global_step % args.ref_model_sync_steps == 0:",
        "if state.global_step % args.ref_model_sync_steps == 1:",
        draw(80),
    ),
    # what a run shows
    Mutant(
        "observe/clock.py",
        "self.totals[self._open[-1][0]] +=",
        "self.totals[self._open[0][0]] +=",
        "tests/unit/test_clock.py::test_a_phase_inside_another_interrupts_it",
    ),
    Mutant(
        "training/loop.py",
        'if self.clock.leave("update"):',
        'if self.clock.leave("update") or True:',
        "tests/unit/test_clock.py::test_every_update_logs_where_its_time_went",
    ),
    Mutant(
        "training/evaluating.py",
        "with self._rewards_open(), self.clock.measuring(EVALUATION):",
        "with self._rewards_open():",
        "tests/unit/test_clock.py::test_every_update_logs_where_its_time_went",
    ),
    Mutant(
        "rewards/calling/still_running.py",
        "running.said_at = 2 * seconds",
        "running.said_at = seconds",
        "tests/unit/test_still_running.py::test_it_is_said_again_when_the_time_has_doubled",
    ),
    Mutant(
        "observe/progress.py",
        "            self._take_over_handlers(before)\n",
        "",
        "tests/unit/test_progress.py::test_what_others_say_stands_above_the_panel",
    ),
    Mutant(
        "training/callbacks.py",
        "trainer.completion_log.console = trainer.report, view.console",
        "trainer.completion_log.console = trainer.report, None",
        "tests/unit/test_progress.py::test_what_others_say_stands_above_the_panel",
    ),
    Mutant(
        "observe/view.py",
        "        transformers_logging.disable_progress_bar()\n",
        "",
        "tests/unit/test_progress.py::test_what_others_say_stands_above_the_panel",
    ),
    Mutant(
        "training/loop.py",
        "            close_view(self)\n",
        "            pass\n",
        "tests/unit/test_progress.py::test_an_error_closes_the_panel",
    ),
    Mutant(
        "observe/numbers.py",
        "self._last = (self._last[0] + spent, *self._last[1:])",
        "pass",
        "tests/unit/test_progress.py::test_speed_and_time_left_leave_evaluations_out",
    ),
    Mutant(
        "data/loader.py",
        "seed = args.seed if args.data_seed is None else args.data_seed",
        "seed = args.seed",
        "tests/parity/test_oracle.py::test_seed_decides_prompts_and_noise",
    ),
    Mutant(
        "training/passes.py",
        "Forward(policy, temperature, keep_logits=keep_logits)",
        "Forward(policy, 1.0, keep_logits=keep_logits)",
        draw(11),
    ),
    Mutant(
        "training/passes.py",
        "self._reference_forward = Forward(reference.model, temperature)",
        "self._reference_forward = Forward(reference.model, 1.0)",
        draw(21),
    ),
    Mutant(
        "training/assemble.py",
        'return float(getattr(config, "router_aux_loss_coef", 0.0) if wanted is None else wanted)',
        'return float(getattr(config, "router_aux_loss_coef", 0.0))',
        draw(21),
    ),
    Mutant(
        "training/policy.py",
        "    if args.disable_dropout:\n        loading.disable_dropout(model)\n    return Policy(",
        "    return Policy(",
        draw(46),
    ),
    Mutant(
        "training/budget.py",
        "return self.tokens * self.factor",
        "return self.tokens // self.factor",
        "tests/integration/test_memory.py::test_running_out_in_a_pass_without_gradient_leaves_the_training_budget[1]",
    ),
    Mutant(
        "training/assigner.py",
        "            self._set_advantages(rollout, _whole_groups(rollout, left))\n",
        "            pass\n",
        draw(368),
    ),
    # generation
    Mutant(
        "generation/native/scheduler.py",
        "del self.tokens[1:], self.stats[1:]",
        "del self.tokens[1:]",
        "tests/unit/test_scheduler.py::test_little_memory_sends_the_youngest_back",
    ),
    Mutant(
        "generation/native/scheduler.py",
        "return len(self.tokens) - 1",
        "return len(self.tokens)",
        "tests/parity/test_native_engine.py::test_greedy_is_generate_and_logprobs_are_a_plain_forwards[llama]",
    ),
    Mutant(
        "generation/native/scheduler.py",
        "self._send_back(queue.pop())\n",
        "self._send_back(queue.popleft())\n",
        "tests/unit/test_scheduler.py::test_little_memory_sends_the_youngest_back",
    ),
    Mutant(
        "generation/native/scheduler.py",
        "        self._free(sequence)\n        prompt = sequence.prompt",
        "        sequence.pages = []\n        prompt = sequence.prompt",
        "tests/unit/test_scheduler.py::test_little_memory_sends_the_youngest_back",
    ),
    Mutant(
        "generation/native/scheduler.py",
        "wanted = min(sequence.cached + steps, self.max_new_tokens)",
        "wanted = sequence.cached",
        "tests/unit/test_scheduler.py::test_little_memory_sends_the_youngest_back",
    ),
    Mutant(
        "generation/native/rows.py",
        "goes_on = alive & ~torch.isin(drawn.tokens, self.ends) & (self.remaining > 1)",
        "goes_on = alive & ~torch.isin(drawn.tokens, self.ends) & (self.remaining > 0)",
        "tests/parity/test_native_engine.py::test_the_same_noise_whatever_the_batch_is_made_of",
    ),
    Mutant(
        "generation/native/rows.py",
        "goes_on = alive & ~torch.isin(drawn.tokens, self.ends) &",
        "goes_on = alive &",
        "tests/unit/test_engines.py::test_how_completions_end[NativeEngine]",
    ),
    Mutant(
        "generation/native/rows.py",
        "self.positions += goes_on.unsqueeze(1)",
        "self.positions += 2 * goes_on.unsqueeze(1)",
        "tests/parity/test_native_engine.py::test_greedy_is_generate_and_logprobs_are_a_plain_forwards[llama]",
    ),
    Mutant(
        "generation/native/rows.py",
        "[max_new_tokens - length for length in lengths]",
        "[max_new_tokens for length in lengths]",
        "tests/parity/test_native_engine.py::test_the_same_noise_whatever_the_batch_is_made_of",
    ),
    Mutant(
        "generation/native/sampling/sampler.py",
        "z = logits.float() / self.temperature\n",
        "z = logits.float() * self.temperature\n",
        "tests/unit/test_sampler.py::test_plain_logprobs_and_entropy_know_neither_filters_nor_penalty",
    ),
    Mutant(
        "generation/native/sampling/sampler.py",
        "kept = before > 1.0 - top_p",
        "kept = before > top_p",
        "tests/unit/test_sampler.py::test_frequencies_are_those_of_the_exact_distribution",
    ),
    Mutant(
        "generation/native/sampling/sampler.py",
        "p < self.min_p * p.amax(-1, keepdim=True)",
        "p < self.min_p",
        "tests/unit/test_sampler.py::test_frequencies_are_those_of_the_exact_distribution",
    ),
    Mutant(
        "generation/native/sampling/sampler.py",
        "torch.where(z < 0, z * self.penalty, z / self.penalty)",
        "z / self.penalty",
        "tests/unit/test_sampler.py::test_frequencies_are_those_of_the_exact_distribution",
    ),
    Mutant(
        "generation/native/sampling/noise.py",
        'derive_seed(seed, "completion", prompt, sample)',
        'derive_seed(seed, "completion", sample)',
        "tests/unit/test_engines.py::test_a_prompts_number_decides_its_noise[NativeEngine]",
    ),
    Mutant(
        "generation/native/sampling/noise.py",
        "(positions + 0x9E3779B9) & MASK",
        "(0 * positions + 0x9E3779B9) & MASK",
        "tests/unit/test_sampler.py::test_noise_is_uniform_and_independent_across_samples_and_positions",
    ),
    Mutant(
        "generation/native/engine.py",
        "number = index if prompt.number is None else prompt.number",
        "number = index",
        "tests/unit/test_engines.py::test_a_prompts_number_decides_its_noise[NativeEngine]",
    ),
    Mutant(
        "generation/native/decode_loop.py",
        "what it has drawn since is dropped.\n                continue\n",
        "what it has drawn since is dropped.\n                pass\n",
        "tests/unit/test_engines.py::test_steps_begun_before_a_readback_draw_the_same",
    ),
    Mutant(
        "generation/forked.py",
        "self.cache.batch_repeat_interleave(k)",
        "self.cache.batch_repeat_interleave(1)",
        "tests/unit/test_engines.py::test_forked_draws_the_same_noise_as_native",
    ),
    Mutant(
        "generation/forked.py",
        "positions = self.mask.sum(-1, keepdim=True)",
        "positions = self.mask.sum(-1, keepdim=True) - 1",
        "tests/unit/test_engines.py::test_forked_draws_the_same_noise_as_native",
    ),
    Mutant(
        "generation/forked.py",
        "torch.full_like(keys, step)",
        "torch.full_like(keys, 0)",
        "tests/unit/test_engines.py::test_forked_draws_the_same_noise_as_native",
    ),
    Mutant(
        "generation/transformers.py",
        "        torch.manual_seed(seed)\n",
        "        torch.manual_seed(0)\n",
        "tests/unit/test_generation.py::test_groups_are_whole_independent_and_repeatable",
    ),
    Mutant(
        "generation/transformers.py",
        "        owner.generation_config = generation_config\n",
        "        pass\n",
        "tests/unit/test_generation.py::test_sampling_options_of_the_checkpoint_do_not_leak_in",
    ),
    Mutant(
        "models/verify.py",
        "        model.train(training)\n",
        "        pass\n",
        "tests/unit/test_generation.py::test_generation_leaves_model_and_random_state_alone",
    ),
    Mutant(
        "generation/transformers.py",
        "start = index * num_generations\n",
        "start = index\n",
        "tests/unit/test_generation.py::test_completions_belong_to_their_prompt",
    ),
    Mutant(
        "generation/base.py",
        "return LENGTH if len(tokens) >= sampling.max_completion_length else None",
        "return LENGTH if len(tokens) > sampling.max_completion_length else None",
        "tests/unit/test_engines.py::test_a_limit_of_one_token_and_one_completion",
    ),
    Mutant(
        "generation/padding.py",
        "        input_ids[row, width - len(tokens) :] = torch.tensor(tokens)",
        "        input_ids[row, : len(tokens)] = torch.tensor(tokens)",
        "tests/unit/test_generation.py::test_completions_belong_to_their_prompt",
    ),
    Mutant(
        "generation/base.py",
        "    ends = [tokens.index(end) for end in eos_token_ids if end in tokens]",
        "    ends = [tokens.index(end) for end in eos_token_ids[:1] if end in tokens]",
        "tests/unit/test_generation.py::test_first_end_token_decides_even_where_padding_is_the_same_token",
    ),
    Mutant(
        "generation/native/sampling/noise.py",
        'derive_seed(seed, "completion", prompt, sample)',
        'derive_seed("completion", prompt, sample)',
        "tests/unit/test_engines.py::test_a_prompts_number_decides_its_noise[NativeEngine]",
    ),
    Mutant(
        "generation/forked.py",
        "numbers = [index if p.number is None else p.number for index, p in enumerate(prompts)]",
        "numbers = [index for index, p in enumerate(prompts)]",
        "tests/unit/test_engines.py::test_a_prompts_number_decides_its_noise[ForkedEngine]",
    ),
    # what is lost, and who takes it
    Mutant(
        "training/finite.py",
        "            model.zero_grad(set_to_none=True)\n",
        "",
        "tests/integration/test_finite.py::test_an_update_that_is_not_finite_is_skipped",
    ),
    Mutant(
        "training/finite.py",
        "        if self.in_a_row >= IN_A_ROW:",
        "        if self.in_a_row > 10 * IN_A_ROW:",
        "tests/integration/test_finite.py::test_several_in_a_row_end_the_run",
    ),
    Mutant(
        "training/finite.py",
        "    if names:\n",
        "    if not names:\n        return\n    if False:\n",
        "tests/integration/test_finite.py::test_a_checkpoint_never_holds_what_is_no_number",
    ),
    Mutant(
        "training/interrupts.py",
        "            control.should_save = control.should_training_stop = True",
        "            control.should_training_stop = True",
        "tests/integration/test_interrupts.py::test_the_running_update_is_finished_and_saved",
    ),
    Mutant(
        "training/checkpoint.py",
        "            if _measured(path / name) != expected:",
        "            if _measured(path / name) is None:",
        "tests/integration/test_resume.py::test_a_damaged_checkpoint_is_passed_over_by_name",
    ),
    Mutant(
        "training/folder.py",
        "    os.register_at_fork(after_in_child=_close_inherited_locks)",
        "    pass",
        "tests/integration/test_output_folder.py::test_what_a_dead_process_has_forked_blocks_nobody",
    ),
    Mutant(
        "training/folder.py",
        "            certain = [item for item in left if item.name in known or OF_RUNS.fullmatch(item.name)]",
        "            certain = list(left)",
        "tests/integration/test_output_folder.py::test_guesses_are_moved_and_never_deleted",
    ),
    Mutant(
        "training/identity.py",
        "    if changed and not anyway:",
        "    if False:",
        "tests/integration/test_output_folder.py::test_a_checkpoint_of_another_run_is_refused_by_what_differs",
    ),
    # -- sharded weights
    Mutant(
        "training/sharded.py",
        "                module.set_gradient_divide_factor(1.0)",
        "                module.set_gradient_divide_factor(2.0)",
        "tests/integration/test_sharded.py::test_two_halves_are_as_one[sequence]",
    ),
    Mutant(
        "training/sharded.py",
        "[name for name in parts if name in self._stale]",
        "[name for name in parts if not self._stale]",
        "tests/integration/test_sharded.py::test_two_halves_are_as_one[sequence]",
    ),
    Mutant(
        "training/sharded.py",
        "            p.data = p.data.float()",
        "            pass",
        "tests/integration/test_sharded.py::test_bfloat16_weights_learn_in_float32",
    ),
    Mutant(
        "training/placement.py",
        "        self._placed = {}",
        "        pass",
        "tests/integration/test_sharded.py::test_the_main_process_alone_reads_a_model_by_name[by name]",
    ),
    Mutant(
        "training/placement.py",
        "        if wanted[place] != place:",
        "        if False:",
        "tests/integration/test_sharded.py::test_two_halves_are_as_one[layered by name]",
    ),
    # -- replay and diff
    Mutant(
        "training/playback.py",
        "    return math.nan if value is None else float(value)",
        "    return 0.0 if value is None else float(value)",
        "tests/integration/test_replay.py::test_a_score_that_was_none_is_none_again",
    ),
    Mutant(
        "training/playback.py",
        '        if not group or group[0].get("prompt") != asked:',
        "        if not group:",
        "tests/integration/test_replay.py::test_what_cannot_be_replayed_is_said",
    ),
    Mutant(
        "training/replay.py",
        "            batch.first = True",
        "            pass",
        "tests/integration/test_replay.py::test_a_hundred_samples_of_a_killed_run_come_out_as_they_were_stored",
    ),
    Mutant(
        "training/replay.py",
        "        if number <= step and checkpoint.damage(folder) is None:",
        "        if number <= step + 1 and checkpoint.damage(folder) is None:",
        "tests/integration/test_replay.py::test_scores_are_the_stored_ones_and_a_new_call_stands_beside_them",
    ),
    Mutant(
        "observe/compare.py",
        "    for name, what in CAUSES:",
        "    for name, what in reversed(CAUSES):",
        "tests/unit/test_compare.py::test_the_cause_is_named_before_what_follows_from_it",
    ),
    # -- the search for a text
    Mutant(
        "observe/page/text_search.py",
        "        yield from self._slices(known, end)",
        "        yield from self._slices(0, end)",
        "tests/unit/test_page.py::test_of_a_run_that_goes_on_only_new_rows_are_searched",
    ),
    Mutant(
        "observe/page/text_search.py",
        "        last = slice(max(count - 1, 0), count)",
        "        last = slice(0, 0)",
        "tests/unit/test_page.py::test_a_search_does_not_go_on_in_rows_that_are_others",
    ),
    Mutant(
        "observe/page/needle.py",
        """self.text in json.loads(b'"' + text + b'"')""",
        "True",
        "tests/unit/test_page.py::test_what_only_json_writes_is_not_found",
    ),
    Mutant(
        "observe/page/needle.py",
        'sure = b"\\\\" not in before and not self._halves',
        'sure = b"\\\\" not in before',
        "tests/unit/test_text_filter.py::test_half_of_a_pair_is_not_found_in_a_whole_one",
    ),
    Mutant(
        "observe/page/needle.py",
        "ESCAPE if first in HEXADECIMAL else",
        "0 if first in HEXADECIMAL else",
        "tests/unit/test_text_filter.py::test_what_begins_within_an_escape_is_no_match[00e9]",
    ),
    Mutant(
        "observe/page/needle.py",
        "else int(first in ESCAPED)",
        "else 0",
        "tests/unit/test_text_filter.py::test_what_begins_within_an_escape_is_no_match[n]",
    ),
    Mutant(
        "observe/page/needle.py",
        "LOCKED, SHORT = 512,",
        "LOCKED, SHORT = 0,",
        "tests/unit/test_text_filter.py::test_long_texts_are_searched_without_pythons_lock[20000-True]",
    ),
    Mutant(
        "observe/page/live.py",
        "        if query.limit:\n",
        "        if True:\n",
        "tests/unit/test_text_filter.py::test_a_page_that_only_counts_reads_no_rows",
    ),
    Mutant(
        "observe/text_filter.py",
        "    return until[:, -1] | across",
        "    return until[:, -1]",
        "tests/unit/test_text_filter.py::test_a_word_has_a_bit_wherever_a_text_begins[0]",
    ),
    Mutant(
        "observe/text_filter.py",
        "    span = (np.uint64(2) <<",
        "    span = (np.uint64(1) <<",
        "tests/unit/test_text_filter.py::test_the_rows_of_a_block_are_those_with_a_byte_in_it",
    ),
    Mutant(
        "observe/text_filter.py",
        ' & (found["check"] == checks_of(found))',
        "",
        "tests/unit/test_text_filter.py::test_a_damaged_filter_loses_nothing[zeros in a table]",
    ),
    Mutant(
        "observe/text_filter.py",
        "if header == header_of(index_id) else 0",
        "if header else 0",
        "tests/unit/test_text_filter.py::test_a_filter_that_an_older_version_left_beside_a_resumed_run_is_not_used",
    ),
    Mutant(
        "observe/filter_writer.py",
        'np.flatnonzero(found["first"] + found["rows"] > rows)',
        'np.flatnonzero(found["first"] > 10**9)',
        "tests/unit/test_text_filter.py::test_a_resumed_run_has_no_filter_of_what_it_dropped[7-2000]",
    ),
    Mutant(
        "observe/store.py",
        "            set_filter_aside(self.folder)",
        "            pass",
        "tests/unit/test_text_filter.py::test_a_resume_that_fails_leaves_no_filter",
    ),
    Mutant(
        "observe/page/live.py",
        "                    older.give_way(search)",
        "                    pass",
        "tests/unit/test_page.py::test_what_was_typed_last_is_searched_first",
    ),
    Mutant(
        "observe/page/live.py",
        "    return len(order) == len(possible) and bool(search.seen[order].all())",
        "    return True",
        "tests/unit/test_text_filter.py::test_rows_that_may_still_change_are_not_called_final",
    ),
    Mutant(
        "observe/page/query.py",
        "np.flatnonzero(values <= np.partition(values, end - 1)[end - 1])",
        "np.flatnonzero(values < np.partition(values, end - 1)[end - 1])",
        "tests/unit/test_page.py::test_a_page_of_rows_is_a_stretch_of_all_in_order",
    ),
    Mutant(
        "observe/row_table.py",
        "            if names != self.names or len(base) != len(self._base):",
        "            if len(base):",
        "tests/unit/test_runs.py::test_an_index_that_has_not_grown_is_mapped_once",
    ),
    Mutant(
        "training/kl_weight.py",
        "self.value = min(max(adapted_beta(self.value, kl, self.target, self.gain), low), high)",
        "self.value = adapted_beta(self.value, kl, self.target, self.gain)",
        "tests/integration/test_kl_target.py::test_beta_stays_within_a_hundred_times_of_where_it_began",
    ),
    Mutant(
        "observe/runs.py",
        'trained = (row for row in self._lines() if row.get("mode") == "train")',
        "trained = self._lines()",
        "tests/unit/test_compare.py::test_the_same_runs_do_not_part",
    ),
    Mutant(
        "training/zero.py",
        '    plugin.zero_stage = config["zero_optimization"]["stage"] = 2',
        "    plugin.zero_stage = 2",
        "tests/unit/test_doctests.py::test_examples[rloom.training.zero]",
    ),
    # -- out of memory under FSDP2
    Mutant(
        "training/learner.py",
        "            self.processes.bring_back_copy()",
        "            pass",
        "tests/integration/test_sharded_memory.py::test_it_is_as_one_process[often-freed]",
    ),
    Mutant(
        "training/attempts.py",
        "            restore_random_state(randomness)",
        "            pass",
        "tests/integration/test_sharded_memory.py::test_random_draws_and_values_are_those_of_one_clean_attempt",
    ),
    Mutant(
        "training/attempts.py",
        "            if undo is not None:",
        "            if False:",
        "tests/integration/test_sharded_memory.py::test_wherever_it_fails_it_is_as_smaller_micro_batches[often-backward]",
    ),
    Mutant(
        "training/budget.py",
        "        if self.allowed(gradient) >= had:",
        "        if True:",
        "tests/integration/test_sharded_memory.py::test_budgets_of_other_sizes_become_equal",
    ),
    Mutant(
        "training/callbacks.py",
        "return processes.any(not tried) if processes.repeats_together else not tried",
        "return not tried",
        "tests/integration/test_sharded_memory.py::test_the_worst_case_is_due_where_one_process_has_not_run_it",
    ),
    # -- out of memory under DeepSpeed, and under FSDP2 with torch 2.11
    Mutant(
        "training/attempts.py",
        "            idle(number == left)",
        "            idle(False)",
        "tests/unit/test_zero_attempts.py::test_a_process_that_failed_runs_the_attempt_again_and_leaves_out_what_it_has_had",
    ),
    Mutant(
        "training/zero_attempts.py",
        "            if number in self._heard:",
        "            if False:",
        "tests/unit/test_zero_attempts.py::test_a_process_that_failed_runs_the_attempt_again_and_leaves_out_what_it_has_had",
    ),
    Mutant(
        "training/zero_attempts.py",
        "    optimizer.micro_step_id = -1",
        "    pass",
        "tests/unit/test_zero_attempts.py::test_nothing_is_left_of_a_failed_update",
    ),
    Mutant(
        "training/zero_attempts.py",
        "            gradients[group] = None",
        "            pass",
        "tests/unit/test_zero_attempts.py::test_nothing_is_left_of_a_failed_update",
    ),
    Mutant(
        "training/zero_engine.py",
        "            drop_gradients(self._engine)",
        "            pass",
        "tests/unit/test_zero_attempts.py::test_one_process_drops_gradients_before_it_repeats",
    ),
    Mutant(
        "training/sharded_attempts.py",
        "            weights._to_sharded()",
        "            pass",
        "tests/integration/test_sharded_memory.py::test_by_hand_nothing_is_left_of_a_micro_batch[True]",
    ),
    Mutant(
        "training/sharded_attempts.py",
        "            value.clear()",
        "            pass",
        "tests/unit/test_doctests.py::test_examples[rloom.training.sharded_attempts]",
    ),
    Mutant(
        "training/sharded_attempts.py",
        "    model._state_ctx.post_backward_final_callback_queued = False",
        "    pass",
        "tests/integration/test_sharded_memory.py::test_by_hand_nothing_is_left_of_a_micro_batch[True]",
    ),
    # -- checkpoints in parts
    Mutant(
        "training/sharded_checkpoint.py",
        '        if values := and_low_bits(state.get(name, {}), weights[f"model.{name}"]):',
        "        if values := state.get(name, {}):",
        "tests/integration/test_sharded.py::test_parts_as_a_whole_are_what_a_whole_checkpoint_has",
    ),
    Mutant(
        "training/checkpoint.py",
        'NUMBERS = (".safetensors", ".bin", ".pt", ".pth", ".distcp")',
        'NUMBERS = (".safetensors", ".bin", ".pt", ".pth")',
        "tests/integration/test_sharded.py::test_a_part_that_is_missing_or_damaged_is_named",
    ),
    # -- checkpoints under DeepSpeed
    Mutant(
        "training/zero_checkpoint.py",
        "            values = copy.deepcopy(others) | gathered",
        "            values = others | gathered",
        "tests/unit/test_zero_checkpoint.py::test_a_plain_optimizer_goes_on_from_it",
    ),
    Mutant(
        "training/zero_checkpoint.py",
        "                values = and_low_bits(values, self._on_main(_weight(p)))",
        "                pass",
        "tests/unit/test_zero_checkpoint.py::test_what_was_saved_goes_on_to_the_same_bits",
    ),
    Mutant(
        "training/zero_checkpoint.py",
        "            safe_set_full_fp32_param(p, value.float())\n",
        "            pass\n",
        "tests/unit/test_zero_checkpoint.py::test_what_was_saved_goes_on_to_the_same_bits",
    ),
    Mutant(
        "training/zero_checkpoint.py",
        "    return torch.float32 if dtype == torch.float16 else dtype",
        "    return dtype",
        "tests/unit/test_zero_checkpoint.py::test_what_was_saved_goes_on_to_the_same_bits",
    ),
    Mutant(
        "training/zero_checkpoint.py",
        "            options = next(present) if count else group",
        "            options = group",
        "tests/unit/test_zero_checkpoint.py::test_the_schedules_rates_are_saved",
    ),
    Mutant(
        "training/zero_checkpoint.py",
        "    if found and found != count:",
        "    if False:",
        "tests/unit/test_zero_checkpoint.py::test_files_of_deepspeeds_are_for_as_many",
    ),
    Mutant(
        "models/low_bits.py",
        "    return join_float32(split_float32(value)[0], low_bits)",
        "    return join_float32(value.bfloat16(), low_bits)",
        "tests/unit/test_doctests.py::test_examples[rloom.models.low_bits]",
    ),
    Mutant(
        "training/whole_state.py",
        "if values or low_bits.any() else values",
        "if values else values",
        "tests/unit/test_sharded_state.py::test_weights_without_a_state_keep_their_low_bits",
    ),
    Mutant(
        "training/zero_checkpoint.py",
        "        return master.float()",
        "        return master",
        "tests/unit/test_zero_checkpoint.py::test_masters_may_be_bfloat16",
    ),
    Mutant(
        "training/whole_state.py",
        " or id(p) in embeddings",
        "",
        "tests/unit/test_zero_checkpoint.py::test_frozen_embeddings_are_saved_with_an_adapter",
    ),
    Mutant(
        "training/whole_state.py",
        ' or set(name.split(".")) & set(model.peft_config)',
        "",
        "tests/unit/test_sharded_state.py::test_of_a_model_with_adapters_what_peft_saves_is_gathered",
    ),
    Mutant(
        "models/moving_average.py",
        "                store_float32(saved.float(), own, low_bits)",
        "                own.copy_(saved)",
        "tests/unit/test_moving_average.py::test_a_checkpoint_in_another_dtype_goes_on_to_the_same_bits",
    ),
    # -- the whole copy
    Mutant(
        "training/whole_copy.py",
        "    stays = left >= ROOM * total",
        "    stays = free >= ROOM * total",
        "tests/unit/test_whole_copy.py::test_a_copy_stays_where_a_quarter_of_the_memory_is_left",
    ),
    Mutant(
        "training/whole_copy.py",
        "            if name in self._filled:",
        "            if True:",
        "tests/unit/test_whole_copy.py::test_what_only_the_copy_has_stays",
    ),
    Mutant(
        "training/sharded.py",
        "            for release in self._users:",
        "            for release in ():",
        "tests/integration/test_sharded.py::test_a_copy_that_is_let_go_of_changes_nothing",
    ),
    Mutant(
        "generation/forked.py",
        "return unfinished if self.in_step is None else self.in_step.any(unfinished)",
        "return unfinished",
        "tests/integration/test_sharded.py::test_layer_by_layer_is_as_the_whole_copy",
    ),
    Mutant(
        "training/passes.py",
        "        return nothing_of(self.forward(model, batch).logprobs)",
        "        return self.forward(model, batch).logprobs.sum() * 0.1",
        "tests/integration/test_sharded.py::test_two_halves_are_as_one[token]",
    ),
    Mutant(
        "cli/flag_cache.py",
        "argparse.SUPPRESS if row[name] == argparse.SUPPRESS else row[name]",
        "row[name]",
        "tests/unit/test_flag_cache.py::test_values_are_read_alike",
    ),
    Mutant(
        "cli/flag_cache.py",
        '        if table["key"] != key:',
        "        if False:",
        "tests/unit/test_flag_cache.py::test_a_cache_that_is_old_or_broken_is_made_again",
    ),
    Mutant(
        "training/arguments.py",
        '            rewards_check(rewards, columns, f"`{name}`")',
        "            pass",
        "tests/unit/test_reward_columns.py::test_it_is_refused_before_the_model_is_looked_for",
    ),
    Mutant(
        "rewards/check.py",
        "    if share > 0.5:",
        "    if share > 5:",
        "tests/unit/test_check_reward.py::test_noise_is_told",
    ),
    Mutant(
        "training/saving.py",
        "            self._save_last_state()",
        "            pass",
        "tests/integration/test_card_runs.py::test_the_state_is_there_without_a_checkpoint",
    ),
    Mutant(
        "models/export.py",
        "weight.data = weight.data.float() + change.to(weight.device)",
        "weight.data = weight.data.float()",
        "tests/unit/test_export.py::test_the_merged_model_is_the_adapted_one",
    ),
    Mutant(
        "generation/vllm/dispatch.py",
        "        self._start(self.clients[reply.number % len(self.clients)], reply.number)",
        "        raise error",
        "tests/unit/test_vllm_servers.py::test_a_server_that_dies_is_left_out_and_comes_back",
    ),
    Mutant(
        "generation/vllm/dispatch.py",
        "    return error.status < 500 or client.is_up()",
        "    return True",
        "tests/unit/test_vllm_servers.py::test_a_server_whose_engine_has_died_is_left_out",
    ),
    Mutant(
        "generation/vllm/remote.py",
        "        if not self._known.versions and not self._known.adapter_only:",
        "        if False:",
        "tests/unit/test_vllm_servers.py::test_several_processes_need_servers_that_name_their_weights",
    ),
    Mutant(
        "generation/vllm/remote.py",
        '        self._tell_version(f"sending-{uuid.uuid4().hex[:12]}")',
        "        pass",
        "tests/unit/test_vllm_servers.py::test_while_weights_are_sent_a_server_names_none_that_anybody_has",
    ),
    Mutant(
        "generation/vllm/remote.py",
        "        if served is None or (tells and not self.still_has(model)):",
        "        if served is None:",
        "tests/unit/test_vllm_servers.py::test_a_server_with_other_weights_is_noticed",
    ),
    Mutant(
        "generation/vllm/server.py",
        "                if len(servers) == 1 or server.client.is_up():",
        "                if True:",
        "tests/unit/test_vllm_servers.py::test_a_server_that_dies_after_its_last_answer_costs_nothing",
    ),
    Mutant(
        "generation/vllm/weights.py",
        "_non_persistent_buffers_set:\n                yield tensor",
        "_non_persistent_buffers_set or True:\n                yield tensor",
        "tests/unit/test_vllm_servers.py::test_buffers_that_no_checkpoint_has_do_not_make_another_version",
    ),
    Mutant(
        "generation/vllm/outgoing.py",
        "        key = (dtype, names, other)",
        "        key = object()",
        "tests/unit/test_vllm_servers.py::test_weights_are_written_once_for_all_servers",
    ),
    Mutant(
        "generation/vllm/transfer.py",
        "        self._group = self._store = None",
        "        pass",
        "tests/unit/test_vllm_servers.py::test_a_server_that_refuses_an_update_is_heard",
    ),
    Mutant(
        "generation/vllm/transfer.py",
        "_split(((name, self._prepared(tensor)) for name, tensor in weights), self.at_once)",
        "_split(((name, self._prepared(tensor)) for name, tensor in list(weights)), self.at_once)",
        "tests/unit/test_vllm_servers.py::test_weights_on_their_way_are_there_once",
    ),
    Mutant(
        "generation/vllm/proof.py",
        "            allowed = allowed_difference(Tolerance.VLLM, found, self.rounding)",
        "            allowed = Tolerance.VLLM",
        "tests/unit/test_vllm_servers.py::test_a_policy_that_rounds_a_lot_may_differ_by_more",
    ),
    Mutant(
        "algo/kl.py",
        "    error = min(max(kl / target - 1.0, -0.2), 2.0)",
        "    error = kl / target - 1.0",
        "tests/integration/test_kl_target.py::test_a_kl_that_stays_away_moves_beta_geometrically",
    ),
    Mutant(
        "training/assigner.py",
        "            self.credit.kl_weight.follow(float(kl))",
        "            pass",
        "tests/integration/test_kl_target.py::test_beta_of_each_update_follows_from_the_kl_before",
    ),
    Mutant(
        "training/learner.py",
        "loss + self.assigner.credit.beta * aggregate(",
        "loss + self.config.beta * aggregate(",
        "tests/parity/test_oracle.py::test_run_is_the_oracles",
    ),
    Mutant(
        "observe/courses.py",
        "        return median(abs(b - a) for a, b in pairwise(self.values)) / 0.954 if len(self) > 1 else 0.0",
        "        return fmean(abs(b - a) for a, b in pairwise(self.values)) / 0.954 if len(self) > 1 else 0.0",
        "tests/unit/test_diagnose.py::test_noise_is_told_from_a_trend",
    ),
    Mutant(
        "observe/doctor.py",
        "        if all(line is not None for line in lines):",
        "        if lines[-1] is not None:",
        "tests/unit/test_diagnose.py::test_what_lasts_follows_from_the_history_alone",
    ),
    Mutant(
        "training/callbacks.py",
        "        control.should_save = control.should_training_stop = True\n        self.report",
        "        control.should_training_stop = True\n        self.report",
        "tests/integration/test_early_stop.py::test_a_diagnosis_at_three_logs_in_a_row_ends_the_run",
    ),
    Mutant(
        "observe/history.py",
        "entries=run.metrics() or _of_store(folder)",
        "entries=_of_store(folder) or run.metrics()",
        "tests/unit/test_doctor.py::test_normalized_rewards_of_the_store_are_not_read_beside_logged_ones",
    ),
    Mutant(
        "preflight/group_size.py",
        "    return signal(size) * (size - 1) / size",
        "    return signal(size)",
        "tests/unit/test_preflight.py::test_a_completion_is_worth_what_its_baseline_leaves",
    ),
    Mutant(
        "preflight/group_size.py",
        "        excess = size * pvariance(shares, mean) / (mean * (1 - mean)) - 1",
        "        excess = pvariance(shares, mean) / (mean * (1 - mean))",
        "tests/unit/test_preflight.py::test_the_fit_finds_the_distribution_that_was_drawn_from",
    ),
    Mutant(
        "preflight/estimate.py",
        "    sampled = trained // config.num_iterations",
        "    sampled = trained",
        "tests/unit/test_preflight.py::test_time_tokens_and_cost_of_the_whole_run",
    ),
    Mutant(
        "preflight/dry_run.py",
        "        if state.global_step == state.max_steps - 1:",
        "        if True:",
        "tests/integration/test_preflight_verb.py::test_the_weights_move_in_the_last_update_only",
    ),
    Mutant(
        "preflight/dry_run.py",
        "    rollouts = max(1, groups // 2 // prompts)",
        "    rollouts = 1",
        "tests/unit/test_preflight.py::test_small_rollouts_are_put_together_for_the_update_that_is_measured",
    ),
    Mutant(
        "preflight/dry_run.py",
        "for one in self.sampled if one.update > 1)",
        "for one in self.sampled[1:])",
        "tests/unit/test_preflight.py::test_small_rollouts_are_put_together_for_the_update_that_is_measured",
    ),
    Mutant(
        "preflight/dry_run.py",
        "for one in self.sampled if one.update == self.sampled[-1].update]",
        "for one in self.sampled[-1:]]",
        "tests/unit/test_preflight.py::test_small_rollouts_are_put_together_for_the_update_that_is_measured",
    ),
    Mutant(
        "observe/diagnose.py",
        'if len(course) and course.last() < course.first(1) - 0.25 * logs["reward_std"].first(1):',
        "if False:",
        "tests/unit/test_diagnose.py::test_equal_scores_are_told_without_a_reward",
    ),
    Mutant(
        "observe/diagnose.py",
        "f\"raise {now(args, 'kl_target')}\" if given",
        "f\"raise {now(args, 'kl_target')}\" if False",
        "tests/unit/test_diagnose.py::test_a_beta_that_follows_a_target_is_not_to_be_set",
    ),
    Mutant(
        "cli/replay.py",
        "others if differ else as_stored",
        "as_stored",
        "tests/integration/test_replay.py::test_a_run_of_the_command_line",
    ),
    Mutant(
        "cli/replay.py",
        '"report_to": "none", "push_to_hub": False}',
        '"report_to": "none"}',
        "tests/integration/test_replay.py::test_a_replay_pushes_nothing",
    ),
    Mutant(
        "observe/page/server.py",
        'return re.sub(r":\\d*\\Z", "", host)',
        "return host",
        "tests/unit/test_page.py::test_a_tunnel_has_a_port_of_its_own[localhost:8080]",
    ),
    Mutant(
        "preflight/estimate.py",
        "        changed.gradient_accumulation_steps = changed.steps_per_generation = 1",
        "        pass",
        "tests/unit/test_preflight.py::test_the_run_that_is_recommended_is_estimated_too",
    ),
]
