"""The section [train]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpar.config.typed import AtLeastOne, Count, OneOf, Within

STOP_SIGNALS = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "XCPU")
"""Signals that train.stop_signals may name: other signals cannot be caught, or mean something else."""
_SIGNALS = OneOf(STOP_SIGNALS, '["INT", "TERM", "HUP", "USR1"]')


@dataclass(frozen=True)
class TrainConfig:
    num_steps: Annotated[int, Within(1, 2**40)] = 100
    """Optimizer steps of the whole run; a resumed run makes the remaining ones."""
    micro_batch_size: Annotated[int, Within(1, 2**20)] = 4
    """Samples per micro-batch on each replica."""
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Precision of weights and activations; bf16 and fp16 keep fp32 master weights."""
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are accumulated and reduced; fp64 if dtype is. bf16 saves 2
    bytes a parameter and half of the reduction's traffic. It changes losses and weights: each
    micro-batch's part is rounded to 8 bits when it is added. Requires dtype = "bf16"."""
    seed: Annotated[int, Within(0, 2**64 - 1)] = 1234
    """Seed of initial weights, dropout and the order of samples."""
    threads: Annotated[int, Within(0, 2**10)] = 0
    """CPU threads per process. 0: cores / processes on this machine, at least 1."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs if every process on a machine can have its own, else CPUs."""
    share_gpus: bool = False
    """Let processes share GPUs and communicate over Gloo through host memory: slow, for trying
    out grids on few GPUs."""
    eval_interval: Count = 0
    """Steps between evaluations (also at the start and the end). 0: none."""
    eval_metrics: tuple[Literal["perplexity", "bits_per_byte", "accuracy"], ...] = ()
    """Numbers of evaluations besides the loss, of GPTs. perplexity: e to the power of the loss.
    bits_per_byte: the loss in bits for each byte of the text that the labels stand for. accuracy:
    share of the labels that are the most likely token."""
    stop_by: str = "loss"
    """Number of evaluations that stop_patience compares: loss, one of eval_metrics, or a metric of
    a custom model; of a named validation set as "loss/name". Accuracy and metrics of custom models
    should rise, other numbers fall."""
    stop_patience: Count = 0
    """Evaluations in a row without a better stop_by, after which the run ends. 0: it does not end
    early."""
    eval_batches: Annotated[int, Within(1, 2**30)] = 4
    """Batches of validation samples per evaluation; the loss is the mean over all their labels.
    If there are fewer samples, some count more than once, and the run says so."""
    save_interval: Count = 0
    """Steps between checkpoints (also at the end). 0: only at the end."""
    log_interval: AtLeastOne = 1
    """Steps between two lines of progress."""
    measure_memory: bool = False
    """Report the allocator's peak beside the predicted one at the end of the run. Slows down the
    first batches on CPUs."""
    record_memory: Count = 0
    """Number of steps in which each rank records every malloc, free, read and write of a memory
    block into memory/ in the run folder, for `hybridpar memory --run`. Runs without CUDA graphs."""
    cuda_graphs: bool = True
    """On a GPU: capture micro-batches as CUDA graphs and replay them. Micro-batches of other
    shapes, and models whose forward cannot be captured, run kernel by kernel."""
    graph_grids: bool = False
    """Use CUDA graphs also with pipelines (including virtual stages and V schedules) and tensor
    parallelism. Off by default, because this has been tested with a simulated GPU only."""
    tf32: bool = False
    """On a GPU: multiply fp32 matrices in TF32 (10 bits of mantissa), which is many times as
    fast."""
    fp8: bool = False
    """Multiply hidden matrices in float8 (e4m3, one scale per row), forward and for gradients of
    inputs. Gradients of weights stay in bf16. Requires dtype = "bf16" and, on a GPU, compute
    capability 9.0. The quantized weights take 2 bytes per parameter of hidden matrices and live
    version. Its speed is only estimated so far (docs/gpu.md)."""
    timeout_s: Annotated[float, Within(above=0, most=1e8)] = 60.0
    """Longest wait for another rank, in seconds, before the job is given up; or
    faults.patience_s, if that is longer."""
    stop_signals: Annotated[tuple[str, ...], _SIGNALS] = ("INT", "TERM", "HUP")
    """Signals at which the run saves and ends. INT is Ctrl-C, HUP a closed terminal (nohup:
    ignored). Batch systems may send others, such as USR1."""
    start_from: str = ""
    """Run folder or checkpoint, of any grid, whose weights a new run starts from. Empty: random
    weights."""
    continue_with: tuple[str, ...] = ()
    """Settings that may differ from the run's checkpoints, such as "data.corpus",
    "train.micro_batch_size" or "model.dropout". Weights, optimizer and step are kept. The same
    data continues at its position; different data starts from the beginning."""
