"""Generate text from a GPT checkpoint, on one process or on a grid of tp and pp (decoder.py)."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hybridpar.checkpoint import FullWeights, hold_found, read_held, read_manifest
from hybridpar.checkpoint.stages import load_stage
from hybridpar.comm import broadcast
from hybridpar.config import Launch, TrainConfig
from hybridpar.data.chat_template import ChatTemplate
from hybridpar.data.tokenizer import Tokenizer, check_vocab_fits
from hybridpar.errors import CheckpointError, ConfigError, HybridparError, config_error, not_utf8
from hybridpar.grid import ProcessGrid
from hybridpar.job.stage_split import inference_split
from hybridpar.models.build import DTYPES
from hybridpar.nn.matmul import by_float32
from hybridpar.random import CounterBlock, random_bits, site
from hybridpar.train.faults.errors import describe_failure
from hybridpar.train.inference.decoder import Decoder
from hybridpar.train.launching.launch import Job, choose_backend, choose_device, set_threads

_CPU = torch.device("cpu")
TOGETHER = 16
"""Number of prompts that are computed at once; further prompts wait."""


@dataclass(frozen=True)
class Sampling:
    """Rules for choosing the next token.

    Attributes:
        temperature: Softmax temperature; 0: the most likely token.
        top_k: Number of most likely candidates; 0: all.
        top_p: Keep the most likely candidates that reach this total probability.
        repetition_penalty: Divides positive logits of tokens that the text or its prompt has, and
            multiplies negative ones; 1: none.
        stop: Texts at which a continuation ends; they are not returned.
    """

    max_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (
            ("max_tokens", self.max_tokens),
            ("temperature", self.temperature),
            ("top_k", self.top_k),
        ):
            if not value >= 0:
                raise config_error(
                    name, value, "must not be negative", str(getattr(type(self), name))
                )
        if not 0 < self.repetition_penalty < math.inf:
            value = self.repetition_penalty
            raise config_error("repetition_penalty", value, "must be above 0 and finite", "1.2")
        if not all(self.stop):
            raise config_error("stop", list(self.stop), "must have no empty text", '"\\n\\n"')
        if not 0 < self.top_p <= 1:
            raise config_error("top_p", self.top_p, "must be above 0 and at most 1", "0.9")


class Generator:
    """This rank's part of a GPT, and its tokenizer; only ids that the tokenizer has are chosen."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer):
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.end = tokenizer.end
        self._ends = tokenizer.ends
        has_token = torch.ones(tokenizer.vocab_size, dtype=torch.bool)
        has_token[torch.from_numpy(tokenizer.holes)] = False
        self._ids = has_token.nonzero().squeeze(1).to(decoder.device)
        self._has_holes = len(self._ids) < tokenizer.vocab_size

    @staticmethod
    def load(
        path: str | Path,
        say: Callable[[str], None],
        grid: ProcessGrid | None = None,
        device: torch.device = _CPU,
    ) -> Generator:
        """Load from a run folder (its newest valid checkpoint) or from a checkpoint in it.

        A rank reads only its part of the weights.

        Args:
            grid: Grid of tp and pp. None: this process alone.
            device: The device to generate on.

        Raises:
            CheckpointError: There is no checkpoint.
            ConfigError: It is no GPT, has too few heads or blocks for the grid, or the tokenizer
                has more ids than the model.
            DataError: The tokenizer is damaged.
        """
        return read_held(
            path,
            say,
            lambda folder: Generator._load(folder, str(path), grid or ProcessGrid(), device),
        )

    @staticmethod
    def _load(folder: Path, named: str, grid: ProcessGrid, device: torch.device) -> Generator:
        trained = read_manifest(folder).config
        if not trained.model.can_generate:
            rule = f"holds a {trained.model.kind}; only a GPT can generate text"
            raise config_error("checkpoint", named, rule)
        model = trained.transformer
        tokenizer = folder.parent.parent / "tokenizer.json"
        if not os.path.lexists(tokenizer):
            raise CheckpointError(
                f"{tokenizer}: missing, as the corpus came without a tokenizer; put the "
                f"tokenizer.json there"
            )
        loaded = Tokenizer.load(tokenizer, within=tokenizer.parent)
        check_vocab_fits(loaded.vocab_size, model.vocab_size, f"the tokenizer {tokenizer}")
        numbers = inference_split(model, grid.pp.size)[grid.pp.rank]
        dtype = inference_dtype(trained.train.dtype, device)
        stage = load_stage(FullWeights(folder), grid.tp, numbers, dtype, device)
        return Generator(Decoder(stage, model, grid), loaded)

    def generate(self, prompt: str, sampling: Sampling) -> Iterator[str]:
        """Yield the continuation of `prompt` in pieces; an empty prompt starts a new document.

        Collectives: on all ranks of the grid. Raises: CheckpointError if logits are not finite.
        """
        return (piece for _, piece in self.generate_all([prompt], sampling))

    def generate_all(
        self, prompts: Sequence[str], sampling: Sampling, *, chat: bool = False
    ) -> Iterator[tuple[int, str]]:
        """Yield pieces of the continuations of several prompts, each with its prompt's index.

        A text depends on its prompt, the seed, and how many equal prompts precede it.

        Args:
            chat: Prompts are messages of a user, which the tokenizer's chat template writes.

        Collectives: as for `generate`.
        Raises: as `generate`; ConfigError for a prompt that is not UTF-8 text; DataError if there
        is no chat template.
        """
        template = ChatTemplate.of(self.tokenizer) if chat else None
        texts = []
        check_prompts(prompts)
        for i, prompt in enumerate(prompts):
            if template is None:
                tokens = self.tokenizer.encode_prompt(prompt)
            else:
                asked = template.render([{"role": "user", "content": prompt}], asks=True)
                tokens = self.tokenizer.encode_rendered([asked])[0][0].tolist()
            key = sampling.seed % 2**64, site(f"generate.{tokens}"), 0, prompts[:i].count(prompt)
            pieces = Pieces(self.tokenizer, tokens)
            texts.append(_Text(i, tokens or [self.end], pieces, StopWatch(sampling.stop), key))
        for first in range(0, len(texts), TOGETHER):
            yield from self._generate(texts[first : first + TOGETHER], sampling)

    def _generate(self, texts: list[_Text], sampling: Sampling) -> Iterator[tuple[int, str]]:
        logits = self.decoder.start([text.prompt for text in texts], sampling.max_tokens)
        for position in range(sampling.max_tokens):
            tokens = self._choose(logits, sampling, texts, position)
            last = position + 1 == sampling.max_tokens
            ended = []
            for i, (text, token) in enumerate(zip(texts, tokens, strict=True)):
                text.tokens.append(token)
                has_ended = token in self._ends
                piece = "" if has_ended else text.pieces.add(token)
                if has_ended or last:
                    piece += text.pieces.rest()
                piece = text.stop.add(piece)
                if has_ended or last:
                    piece += text.stop.rest()
                if has_ended or text.stop.has_ended:
                    ended.append(i)
                if piece:
                    yield text.index, piece
            if ended:
                texts = [text for i, text in enumerate(texts) if i not in ended]
                tokens = [token for i, token in enumerate(tokens) if i not in ended]
                self.decoder.forget(ended)
            if last or not texts:
                return
            logits = self.decoder.go_on(tokens)

    def _choose(
        self, logits: Tensor | None, sampling: Sampling, texts: Sequence[_Text], position: int
    ) -> list[int]:
        """Return a token for each text, from the last stage's logits, on all ranks.

        Collectives: one broadcast over all ranks of the grid. Raises: as `generate`, on all ranks.
        """
        world = self.decoder.grid.world
        device = self.decoder.device
        chosen = torch.empty(len(texts), dtype=torch.int64, device=device)
        if logits is not None:
            numbers = [0.0] * len(texts)
            if sampling.temperature > 0:
                numbers = [_uniform(text.key, position) for text in texts]
            uniform = torch.tensor(numbers, dtype=torch.float64, device=device)
            if sampling.repetition_penalty != 1:
                logits = penalized(
                    logits, [text.tokens for text in texts], sampling.repetition_penalty
                )
            if self._has_holes:
                chosen = choose(logits[:, self._ids], sampling, uniform)
                chosen = torch.where(chosen < 0, chosen, self._ids[chosen])
            else:
                chosen = choose(logits[:, : len(self._ids)], sampling, uniform)
        tokens: list[int] = broadcast(
            chosen, world, world.size - self.decoder.grid.tp.size
        ).tolist()
        if min(tokens) < 0:
            raise CheckpointError("the model's logits are not finite, so no token can be sampled")
        return tokens


def check_prompts(prompts: Sequence[str]) -> None:
    """Check that all prompts are UTF-8 text. Raises: ConfigError for the first that is not."""
    for prompt in prompts:
        if flaw := not_utf8(prompt):
            raise config_error(
                "prompt", prompt, f"must be UTF-8 text; {flaw}", '"Once upon a time"'
            )


@dataclass(frozen=True)
class _Text:
    """A prompt, its continuation, the tokens of both, and the key of its random numbers."""

    index: int
    prompt: list[int]
    pieces: Pieces
    stop: StopWatch
    key: tuple[int, int, int, int]
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", list(self.prompt))


@contextmanager
def on_grid(
    path: str, tp: int, pp: int, settings: TrainConfig, launch: Launch
) -> Iterator[Generator]:
    """Create a Generator on a grid of this job's tp * pp processes, and close the group on exit.

    Args:
        path: As for Generator.load.
        settings: Threads and device of the processes.

    Collectives: to be called by all processes.
    Raises: as Generator.load, on all processes alike; RankError if this one fails.
    """

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    set_threads(settings.threads, launch)
    job = Job.connect(launch)
    device = _device(settings, launch, job)
    backend = choose_backend(settings, device)
    with ExitStack() as held:  # rank 0 protects the checkpoint until all ranks have loaded it
        folder = job.decide(lambda: str(held.enter_context(hold_found(path, say)).folder))
        job.require_addresses(backend)
        job.start_group(device, backend, settings.timeout_s)
        grid = ProcessGrid(tp=tp, pp=pp)
        generator = job.together(lambda: Generator.load(folder, say, grid, device))
    assert generator is not None
    try:
        yield generator
        job.end_group()
    except (HybridparError, BrokenPipeError):  # all ranks raised it, or the reader has gone
        raise
    except Exception as error:
        raise describe_failure(error, grid.describe()) from error


def _device(settings: TrainConfig, launch: Launch, job: Job) -> torch.device:
    """Return this process's device. Raises: ConfigError that names the command's option."""
    try:
        return choose_device(settings, launch, job.gather)
    except ConfigError as error:
        raise config_error("device", settings.device, error.problems[0].rule, "cpu") from None


class Pieces:
    """Converts tokens to text as they come, in pieces of whole characters.

    Only the last few tokens are decoded, so that a piece costs the same however long the text is.

    Args:
        behind: Tokens that precede the text.
    """

    def __init__(self, tokenizer: Tokenizer, behind: Sequence[int]):
        self._tokenizer = tokenizer
        self._tokens = list(behind)
        self._read = 0
        self._shown = 0
        self._go_on()

    def add(self, token: int) -> str:
        """Return the text that another token adds; empty in the middle of a character."""
        self._tokens.append(token)
        piece = self.rest()
        if piece.endswith("\ufffd"):
            return ""
        self._go_on()
        return piece

    def rest(self) -> str:
        """Return the text that was not returned yet, if the tokens end here."""
        return self._tokenizer.decode(self._tokens)[self._shown :]

    def _go_on(self) -> None:
        """Keep the tokens of the last piece, on which the text of later tokens may depend."""
        self._tokens = self._tokens[self._read :]
        self._read = len(self._tokens)
        self._shown = len(self._tokenizer.decode(self._tokens))


class StopWatch:
    """Ends a text (`has_ended`) at a stop text, and holds back what may begin one."""

    def __init__(self, stop: Sequence[str]):
        self._stop = stop
        self._held = ""
        self.has_ended = False

    def add(self, piece: str) -> str:
        """Return the text that can be shown after another piece."""
        if not self._stop or self.has_ended:
            return "" if self.has_ended else piece
        text = self._held + piece
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.has_ended = True
            self._held = ""
            return text[: min(found)]
        keep = max(
            (
                length
                for stop in self._stop
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """Return the text that is held back, as nothing follows it."""
        held = self._held
        self._held = ""
        return held


def inference_dtype(name: str, device: torch.device = _CPU) -> torch.dtype:
    """Return the type that a run of train.dtype `name` generates in: the run's, or fp32 on a CPU
    that computes with it in fp32 anyway, and would convert every weight for every token.
    """
    dtype = DTYPES[name]
    return torch.float32 if by_float32(torch.empty(0, dtype=dtype, device=device)) else dtype


def penalized(logits: Tensor, texts: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Return logits after the repetition penalty for the tokens that each text has.

    Shapes: logits [b, v] -> [b, v]. Source: CTRL, arXiv 1909.05858, section 4.1.
    """
    made = logits.clone()
    for row, text in zip(made, texts, strict=True):
        tokens = torch.tensor(sorted(set(text)), device=row.device)
        scores = row[tokens]
        row[tokens] = torch.where(scores > 0, scores / penalty, scores * penalty)
    return made


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Choose a token for each row; -1 for all rows if a logit is not finite.

    Candidates are selected by likelihood, and the token among them in the order of ids, so that
    rounding, which depends on the grid, hardly ever changes the token.

    Shapes: logits [b, v], uniform [b] float64, between 0 and 1 -> [b] int64.
    Source of top_p: arXiv 1904.09751.
    """
    # the sum of finite logits is finite, and one pass, where isfinite() is several
    is_finite = logits.sum(-1).isfinite().all()
    if sampling.temperature == 0:
        return logits.argmax(-1).where(is_finite, -1)
    scores, tokens = logits.topk(min(sampling.top_k or logits.shape[-1], logits.shape[-1]))
    p = torch.softmax((scores - scores[:, :1]).double() / sampling.temperature, -1)
    if sampling.top_p < 1:
        p = p.masked_fill(p.cumsum(-1) - p >= sampling.top_p, 0.0)
    tokens, order = tokens.sort(-1)
    total = p.gather(-1, order).cumsum(-1)
    at = torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True)
    at = at.clamp(max=tokens.shape[-1] - 1)  # beyond the end if a logit is not finite
    return tokens.gather(-1, at).squeeze(-1).where(is_finite, -1)


def _uniform(key: tuple[int, int, int, int], position: int) -> float:
    """Return a random number between 0 and 1 for a position of a text."""
    bits = random_bits(*key, CounterBlock(1, 1, stride=1, start=position))
    return (int(bits) % 2**32 + 0.5) / 2**32
