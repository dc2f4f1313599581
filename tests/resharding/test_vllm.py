from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from mrl.resharding import Layout, MegatronLayout, ModelShape, Piece, plan
from mrl.resharding.coverage import padding_of, view_of
from mrl.resharding.sync import Resharder, run_together
from mrl.resharding.transports import InProcess, Mailbox
from mrl.resharding.verify import compare_with_reload
from mrl.resharding.vllm import engine_layout, live_params, trace
from tests.resharding.closed_form import (
    logical_values,
    megatron_params,
    tensor_info,
    tiny_shape,
    vllm_layout,
    vllm_params,
    vllm_pieces,
)
from tests.resharding.test_hf_files import export, stored


def in_order(pieces):
    return sorted(pieces, key=lambda piece: (piece.param, piece.local))


class Loader(nn.Module):
    """A module that loads two stacked shards, a column slice and a padded vocabulary."""

    def __init__(self):
        super().__init__()
        self.stacked = nn.Parameter(torch.full((6, 4), 7.0))
        self.sliced = nn.Parameter(torch.full((3, 2), 7.0))
        self.experts = nn.Parameter(torch.full((2, 3, 4), 7.0))
        self.vocab = nn.Parameter(torch.full((8, 1), 7.0))

    def load_weights(self, weights):
        for name, weight in weights:
            if name == "a":
                self.stacked.data.narrow(0, 0, 2).copy_(weight.narrow(0, 2, 2))
            elif name == "b":
                self.stacked.data[2:].copy_(weight[4:])
            elif name == "c":
                self.sliced.data.copy_(weight[:, 2:4])
            elif name == "e1":
                self.experts.data[1].copy_(weight)
            elif name == "v":
                self.vocab[:5].data.copy_(weight)
                self.vocab[5:].data.fill_(0)
            elif name == "t":
                self.sliced.data.copy_(weight.t())


SOURCES = {
    "a": tensor_info(4, 4),
    "b": tensor_info(8, 4),
    "c": tensor_info(3, 4),
    "v": tensor_info(5, 1),
}


def test_a_trace_records_every_copy_and_performs_none():
    model = Loader()
    pieces = trace(model, SOURCES, rank=3)
    assert pieces == [
        Piece("a", ((2, 4), (0, 4)), 3, "stacked", ((0, 2), (0, 4))),
        Piece("b", ((4, 8), (0, 4)), 3, "stacked", ((2, 6), (0, 4))),
        Piece("c", ((0, 3), (2, 4)), 3, "sliced", ((0, 3), (0, 2))),
        Piece("v", ((0, 5), (0, 1)), 3, "vocab", ((0, 5), (0, 1))),
    ]
    assert (model.stacked == 7).all() and (model.sliced == 7).all()
    layout = Layout("vllm", SOURCES, tuple(pieces), padded=frozenset({"v"}))
    params = {name: p for name, p in live_params(model).items() if name != "experts"}
    assert [view.shape for view in padding_of(layout, 3, params)] == [(3, 1)]


@pytest.mark.parametrize("name", ["t", "e1"])
def test_a_copy_that_is_no_box_is_refused(name):
    with pytest.raises(ValueError, match=r"no box of a known source|extents differ"):
        trace(Loader(), {name: tensor_info(2, 3) if name == "t" else tensor_info(3, 4)}, 0)


def test_repacked_parameters_are_refused_with_the_remedy():
    model = Loader()
    model.sliced.data = torch.empty(0)
    with pytest.raises(ValueError, match=r"sliced; on CPU set vllm\._custom_ops"):
        live_params(model)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_closed_form_of_the_engine_agrees_with_the_reference(tp, kv_heads):
    shape = tiny_shape(kv_heads=kv_heads, layers=1, vocab=130)
    values = logical_values(shape)
    for rank in range(tp):
        params = vllm_params(shape, tp, values, rank)
        padding_of(vllm_layout(shape, tp, tp), rank, params)
        for piece in vllm_pieces(shape, tp, rank, rank):
            held = view_of(params[piece.param], piece.local)
            assert torch.equal(held, view_of(values[piece.tensor], piece.box)), piece


@dataclass(frozen=True)
class Group:
    """What vLLM's layers ask of a process group while they are built."""

    world_size: int
    rank_in_group: int
    is_first_rank: bool = True
    is_last_rank: bool = True


@pytest.fixture
def vllm_in_place(monkeypatch):
    """Import vLLM so that its CPU weights stay where they were loaded."""
    import vllm._custom_ops

    monkeypatch.setattr(vllm._custom_ops, "_supports_onednn", False)


@pytest.mark.slow
def test_vllms_own_loader_agrees_with_the_closed_form(hf_folder, vllm_in_place, monkeypatch):
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    monkeypatch.setattr(parallel_state, "_PP", Group(1, 0))
    for model_class, tied in ((Qwen2ForCausalLM, True), (LlamaForCausalLM, False)):
        model_type = model_class.__module__.rsplit(".", 1)[1]
        folder = str(hf_folder(model_type, tied, vocab=130, kv_heads=2, name=model_type))
        shape = ModelShape.from_folder(folder)
        config = VllmConfig(
            model_config=ModelConfig(folder, skip_tokenizer_init=True, dtype="float32")
        )
        for tp in (1, 2, 4):
            for rank in range(tp):
                monkeypatch.setattr(parallel_state, "_TP", Group(tp, rank))
                config.compilation_config.static_forward_context.clear()
                with set_current_vllm_config(config):
                    model = model_class(vllm_config=config)
                pieces = trace(model, shape.tensors(), rank)
                assert in_order(pieces) == in_order(vllm_pieces(shape, tp, rank, rank))


def start_engine(folder, monkeypatch):
    from vllm import LLM

    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29741",
    }.items():
        monkeypatch.setenv(name, value)
    return LLM(
        model=str(folder),
        distributed_executor_backend="external_launcher",
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
    )


@pytest.mark.slow
def test_a_live_engine_receives_what_it_would_load_itself(
    hf_folder, tmp_path, vllm_in_place, monkeypatch
):
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    source = hf_folder(tied=True, vocab=130, hidden=128)
    shape = ModelShape.from_folder(source)
    trainer = MegatronLayout(shape, 2, 2, 1, padded_vocab=256)
    engine = start_engine(source, monkeypatch)
    try:
        model = engine.apply_model(lambda live: live)[0]
        params = live_params(model)
        addresses = {name: param.data_ptr() for name, param in params.items()}
        layout = engine_layout(model, shape.tensors("float32"), 0, InProcess(), {})
        assert in_order(layout.pieces) == in_order(vllm_pieces(shape, 1, 0, 0))
        values = {name: value * 0.3 for name, value in stored(source).items()}
        src = {rank: megatron_params(trainer, values, rank) for rank in range(4)}
        steps, mailbox = plan(trainer.layout(), layout), Mailbox()
        for param in params.values():
            param.fill_(float("nan"))  # the padding too
        resharders = [
            Resharder(steps, r, src[r], params if r == 0 else {}, InProcess(r, mailbox))
            for r in range(4)
        ]
        stats = run_together(resharders)[0]
        assert stats.bytes_moved == stats.bytes_floor
        export(tmp_path / "out", source, trainer, src)
        compare_with_reload(model, tmp_path / "out")
        assert addresses == {name: p.data_ptr() for name, p in live_params(model).items()}

        greedy = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, detokenize=False)
        output = engine.generate({"prompt_token_ids": [5, 7, 11]}, greedy)[0].outputs[0]
        row = torch.tensor([[5, 7, 11, *output.token_ids]])
        with torch.no_grad():
            reference = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(row).logits
        expected = reference.log_softmax(-1)[0, 2:-1].gather(1, row[0, 3:, None])[:, 0]
        found = [step[t].logprob for step, t in zip(output.logprobs, output.token_ids, strict=True)]
        assert torch.allclose(torch.tensor(found), expected, atol=1e-4)

        params["model.norm.weight"][3] += 1
        with pytest.raises(ValueError, match=r"differ from .*: model\.norm\.weight"):
            compare_with_reload(model, tmp_path / "out")
    finally:
        del engine
        cleanup_dist_env_and_memory()
