"""The networks: loading them, running them on micro-batches, checking them, and their weights.

- Loading: `load.py` (the trainer), `quick_load.py` (users), `adapters.py` (LoRA and quantization).
- One forward: `logprobs.py` runs a micro-batch, `head.py` makes log-probabilities of hidden states, `positions.py`
  counts positions.
- Packed rows: `attention.py` chooses between `prefix.py` (kernels) and `block_attention.py` (plain torch); `fused.py`
  runs what stands between a layer's products by kernels.
- Kernels, in Triton: `kernels.py`, `prefix_kernels.py`, `fused_kernels.py`; `triton_support.py` says whether they run.
- Weights: `low_bits.py` (bfloat16 and the bits that it drops), `split_weights.py` (float32 weights in two halves),
  `optimizers.py` and `master_weights.py`, `checksums.py`.
- The reference: `reference.py`, and `moving_average.py` for one that follows the policy.
- Self-checks: `verify.py` (what all share), `model_checks.py` (head and packed rows), `mask_probe.py`.
- The machine: `capture.py` (CUDA graphs), `cpu_bfloat16.py`.
"""
