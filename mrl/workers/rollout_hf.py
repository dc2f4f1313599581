"""transformers' generate as the engine, for machines without vLLM: one whole model a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from mrl.resharding.layout import Layout, Piece, TensorInfo, whole
from mrl.types import Sample, SamplingParams
from mrl.workers.rollout import Request
from mrl.workers.specs import RolloutSpec


class HFEngine:
    """A transformers model whose parameters are written in place."""

    def __init__(self, spec: RolloutSpec, device: torch.device) -> None:
        """Build the model with unset weights; the first sync brings them."""
        config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.dtype = str(dtype).removeprefix("torch.")
        self.device, self.batch_size = device, spec.config.max_num_seqs
        self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
        self.model.requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(
            spec.tokenizer_path, trust_remote_code=spec.trust_remote_code
        )
        self.stop_ids = _stop_ids(Path(spec.path), self.model.generation_config, self.tokenizer)

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, policy_version: int
    ) -> list[tuple[Sample, ...]]:
        """Draw `sampling.n` responses a request, in order."""
        rows = [request for request in requests for _ in range(sampling.n)]
        samples: list[Sample] = []
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            samples += self._generate_batch(batch, sampling, policy_version)
        n = sampling.n
        return [tuple(samples[i * n : (i + 1) * n]) for i in range(len(requests))]

    @torch.no_grad()
    def _generate_batch(
        self, rows: Sequence[Request], sampling: SamplingParams, policy_version: int
    ) -> list[Sample]:
        width = max(len(ids) for _, ids in rows)
        pad = self.stop_ids[0]
        tokens = torch.full((len(rows), width), pad, device=self.device)
        attention = torch.zeros_like(tokens)
        for i, (_, ids) in enumerate(rows):  # left padding: responses start in one column
            tokens[i, width - len(ids) :] = torch.tensor(ids, device=self.device)
            attention[i, width - len(ids) :] = 1
        greedy = sampling.temperature == 0
        strings = _StopStrings(self.tokenizer, sampling.stop, width, len(rows))
        output = self.model.generate(
            input_ids=tokens,
            attention_mask=attention,
            do_sample=not greedy,
            temperature=None if greedy else sampling.temperature,
            top_p=None if greedy else sampling.top_p,
            top_k=None if greedy else max(sampling.top_k, 0),
            max_new_tokens=sampling.max_tokens,
            eos_token_id=list(self.stop_ids),
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([strings] if sampling.stop else []),
            return_dict_in_generate=True,
            output_logits=True,
        )
        responses = output.sequences[:, width:].cpu()
        logits = torch.stack(output.logits, 1).float()
        if not greedy:
            logits = logits / sampling.temperature
        chosen = output.sequences[:, width:, None]
        log_probs = logits.log_softmax(-1).gather(-1, chosen)[..., 0].cpu()
        samples = []
        for i, (uid, ids) in enumerate(rows):
            response = responses[i].tolist()
            ends = [k + 1 for k, token in enumerate(response) if token in self.stop_ids][:1]
            ends += [end for end in strings.ends[i : i + 1] if end is not None]
            length = min(ends, default=len(response))
            text = self.tokenizer.decode(response[:length], skip_special_tokens=True)
            samples.append(
                Sample(
                    uid,
                    ids,
                    tuple(response[:length]),
                    tuple(log_probs[i, :length].tolist()),
                    text[: strings.start(text)],
                    "stop" if ends else "length",
                    policy_version,
                )
            )
        return samples

    def params(self) -> Mapping[str, Tensor]:
        """Give the model's parameters; a tied head is the embedding and appears once."""
        return dict(self.model.named_parameters())

    def layout(self, tensors: Mapping[str, TensorInfo], rank: int) -> Layout:
        """Say that the rank has every logical tensor whole, under its own name."""
        held = {name: TensorInfo(info.shape, self.dtype) for name, info in tensors.items()}
        pieces = tuple(
            Piece(name, whole(info.shape), (rank,), name, whole(info.shape))
            for name, info in held.items()
        )
        return Layout("hf engine", held, pieces)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take whole checkpoint tensors."""
        live = self.params()
        for name, tensor in weights:
            live[name].data.copy_(tensor)

    def adapt(self, adapter: Mapping[str, Tensor]) -> None:
        """Refuse: `model.lora.merge=false` is checked to come with vLLM."""
        raise NotImplementedError("rollout.name=hf takes merged weights only")

    def sleep(self) -> None:
        """Do nothing: the weights stay."""

    def wake_weights(self) -> None:
        """Do nothing: the weights stayed."""

    def written(self) -> None:
        """Do nothing: nothing is derived from the weights."""

    def wake_cache(self) -> None:
        """Do nothing: generate keeps no cache between calls."""

    def close(self) -> None:
        """Do nothing."""


class _StopStrings(StoppingCriteria):
    """Ends rows at stop strings as vLLM does, and remembers where.

    What `generate` does itself also looks at the prompt's end, and a row that it ends is filled
    with padding, which may be a stop token that was never drawn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], width: int, rows: int
    ) -> None:
        """Watch for `strings` in what follows the prompts, `width` tokens wide."""
        self.tokenizer, self.strings, self.width = tokenizer, strings, width
        self.ends: list[int | None] = [None] * rows  # response tokens up to the string's last one
        # a character takes up to four tokens: its bytes
        self.window = 4 * max(map(len, strings), default=0)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Say which rows are at their end."""
        tail = input_ids[:, max(self.width, input_ids.shape[1] - self.window) :]
        texts = self.tokenizer.batch_decode(tail, skip_special_tokens=True)
        for i, text in enumerate(texts):
            if self.ends[i] is None and self.start(text) is not None:
                self.ends[i] = input_ids.shape[1] - self.width
        done = [end is not None for end in self.ends]
        return torch.tensor(done, device=input_ids.device)

    def start(self, text: str) -> int | None:
        """Find where the first stop string of a text begins; None without one."""
        return min((text.index(string) for string in self.strings if string in text), default=None)


def _stop_ids(
    folder: Path, of_the_model: GenerationConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """List the tokens that end a response: those of generation_config.json, as vLLM reads it."""
    config = of_the_model
    if (folder / "generation_config.json").is_file():
        config = GenerationConfig.from_pretrained(folder)
    configured = config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    known = [i for i in [*ids, tokenizer.eos_token_id] if i is not None]
    if not known:
        raise ValueError("neither generation_config.json nor the tokenizer names an EOS token")
    return tuple(dict.fromkeys(known))
