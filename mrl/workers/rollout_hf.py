"""transformers' generate as the engine, for machines without vLLM: one whole model a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

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
        self.stop_ids = _stop_ids(self.model.generation_config.eos_token_id, self.tokenizer)

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
            stop_strings=list(sampling.stop) or None,
            tokenizer=self.tokenizer if sampling.stop else None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        responses = output.sequences[:, width:].cpu()
        logits = torch.stack(output.logits, 1).float()
        if not greedy:
            logits = logits / sampling.temperature
        chosen = output.sequences[:, width:, None]
        log_probs = logits.log_softmax(-1).gather(-1, chosen)[..., 0].cpu()
        return [
            self._sample(uid, ids, responses[i].tolist(), log_probs[i].tolist(), policy_version)
            for i, (uid, ids) in enumerate(rows)
        ]

    def _sample(
        self,
        uid: str,
        prompt: tuple[int, ...],
        response: list[int],
        log_probs: list[float],
        policy_version: int,
    ) -> Sample:
        ends = [i for i, token in enumerate(response) if token in self.stop_ids]
        length = ends[0] + 1 if ends else len(response)
        return Sample(
            uid,
            prompt,
            tuple(response[:length]),
            tuple(log_probs[:length]),
            self.tokenizer.decode(response[:length], skip_special_tokens=True),
            "stop" if ends else "length",
            policy_version,
        )

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


def _stop_ids(configured: int | list[int] | None, tokenizer: AutoTokenizer) -> tuple[int, ...]:
    ids = configured if isinstance(configured, list) else [configured]
    known = [i for i in [*ids, tokenizer.eos_token_id] if i is not None]
    if not known:
        raise ValueError("neither generation_config.json nor the tokenizer names an EOS token")
    return tuple(dict.fromkeys(known))
