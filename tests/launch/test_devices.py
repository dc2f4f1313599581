from __future__ import annotations

import pytest

from mrl.launching.devices import CUDA, contradictions, device_of_rank, visible_devices


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        (None, "0 1 2 3 4 5 6 7"),
        ("1,2,4,5", "1 2 4 5"),
        ("", ""),
        ("NoDevFiles", ""),
        ("-1", ""),
        ("0,1,-1,2", "0 1"),
        ("0,9", "0"),
        ("GPU-ab12,MIG-cd34", "GPU-ab12 MIG-cd34"),
        (" 3, 2", "3 2"),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(said: str | None, seen: str) -> None:
    given = {} if said is None else {CUDA: said}
    assert visible_devices(given, 8) == tuple(seen.split())


def test_each_rank_has_a_gpu_of_its_own() -> None:
    seen = visible_devices({CUDA: "1,2,4,5"}, 8)
    devices = [device_of_rank(rank, seen, "cuda") for rank in range(4)]
    assert devices == [f"cuda:{i} = GPU {gpu}" for i, gpu in enumerate((1, 2, 4, 5))]
    assert device_of_rank(0, seen, "cpu") == "cpu"
    assert device_of_rank(4, seen, "cuda") == "cuda:4 = none"
    assert device_of_rank(0, ["GPU-5a1f9e02-77aa"], "cuda") == "cuda:0 = GPU-5a1f9e02"
    assert not contradictions({CUDA: "1,2,4,5"}, 8, 4, ray=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({CUDA: "0,0"}, "CUDA_VISIBLE_DEVICES=0,0 names GPU 0 twice"),
        ({CUDA: "0,9"}, "CUDA_VISIBLE_DEVICES=0,9: 1 of it are GPUs"),
        ({CUDA: "NoDevFiles"}, "2 ranks a host (trainer.n_gpus_per_node), 0 GPUs are visible"),
        ({CUDA: "0,1", "HIP_VISIBLE_DEVICES": "1,0"}, "unset HIP_VISIBLE_DEVICES"),
        ({CUDA: "0,1", "ROCR_VISIBLE_DEVICES": "0"}, "unset ROCR_VISIBLE_DEVICES"),
        ({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}, "unset it where Ray is started"),
    ],
)
def test_contradictions_name_the_variables(given: dict[str, str], said: str) -> None:
    assert any(said in text for text in contradictions(given, 8, 2, ray=True))
