"""The `mrl` command. Heavy libraries load only for the commands that need them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.interrupts import insistent_interrupts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mrl.config import Config

_USER_ERRORS = (ValueError, FileNotFoundError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; wrong input ends with one message and status 2, a failed rank with 1."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse gives up on positionals that follow an option: mrl plan CONFIG --json key=value
    if any(text.startswith("-") for text in rest) or (rest and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("mrl").setLevel(logging.INFO)
    try:
        with insistent_interrupts():
            status = arguments.run(arguments)
    except _USER_ERRORS as error:
        if os.environ.get("RANK", "0") == "0":  # all ranks of a launcher see the same input
            print(f"mrl {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"mrl {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:
        from mrl.workers.group import WorkerError

        if not isinstance(error, WorkerError):
            raise
        # Process edge: the text names the rank, the call and the remote traceback.
        print(f"mrl {arguments.command}: {error}", file=sys.stderr)
        return 1
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mrl", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int | None], text: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    for name, run, text in (
        ("train", _train, "train a policy with GRPO, RLOO or PPO"),
        ("sft", _sft, "train on prompt/response rows: a warm start"),
        ("plan", _plan, "check a config and print what would run, without torch"),
    ):
        command = add(name, run, text)
        command.add_argument("config", help="a YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value")
        if name == "plan":
            command.add_argument("--json", action="store_true", help="print JSON")
    reshard = add("reshard", _reshard, "print what a weight update moves, without torch or GPUs")
    reshard.add_argument("config", help="a YAML file; model.path needs a config.json alone")
    reshard.add_argument("overrides", nargs="*", metavar="key=value")
    reshard.add_argument("--json", action="store_true", help="print JSON, bytes and seconds")
    reshard.add_argument("--all", action="store_true", help="print every rank, not classes of them")
    reshard.add_argument("--gpu", default="h100", help="h100 (default), h200 or a100-80")
    reshard.add_argument("--network", help="hdr, ndr, xdr, roce-100 or roce-400, one adapter a GPU")
    reshard.add_argument("--natural", action="store_true", help="rank i in engine slot i")
    reshard.add_argument("--plot", metavar="FILE.png", help="draw layouts and traffic")
    reshard.add_argument("--tensor", metavar="NAME", help="the tensor whose slices are drawn")
    _add_check_layout(
        add("check-layout", _check_layout, "one batch on several layouts: do the numbers agree?")
    )
    _add_convert(add("convert", _convert, "a Hugging Face folder to Megatron-Core, and back"))
    quickstart = add("quickstart", _quickstart, "the whole way on a laptop: make, warm up, train")
    quickstart.add_argument("overrides", nargs="*", metavar="key=value", help="of the last stage")
    quickstart.add_argument("--config", default="configs/grpo/quickstart.yaml")
    quickstart.add_argument("--seed", type=int, default=1, help="of weights, tasks and sampling")
    return parser


def _plan(arguments: argparse.Namespace) -> None:
    from mrl.config import build_plan, load_config, print_plan

    config = load_config(arguments.config, arguments.overrides)
    plan = build_plan(config)
    if arguments.json:
        print(json.dumps(plan.to_json(), indent=1))
    else:
        print_plan(plan, config)


def _reshard(arguments: argparse.Namespace) -> None:
    from mrl.config import load_config
    from mrl.resharding.draw import print_report
    from mrl.resharding.report import build_report

    config = load_config(arguments.config, arguments.overrides)
    report = build_report(
        config, arguments.gpu, arguments.network, best_slots=not arguments.natural
    )
    if arguments.plot is not None:
        from mrl.resharding.plot import save_plot

        save_plot(report, Path(arguments.plot), arguments.tensor)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        print_report(report, arguments.tensor, arguments.all)


def _load(arguments: argparse.Namespace) -> Config:
    """Load a config whose files are there and which can be trained."""
    from mrl.config import check_files, check_trainable, load_config

    config = load_config(arguments.config, arguments.overrides)
    check_files(config)
    check_trainable(config)
    return config


def _tokenizer(config: Config) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    path = config.model.tokenizer_path or config.model.path
    return AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)


def _train(arguments: argparse.Namespace) -> None:
    from mrl.config import build_plan, print_plan

    config = _load(arguments)
    from mrl.workers.job import serve_as_rank

    if serve_as_rank(config):  # the data and the console are rank 0's
        return
    print_plan(build_plan(config), config)
    from mrl.trainer import RayPPOTrainer

    RayPPOTrainer(config, _tokenizer(config)).fit()


def _sft(arguments: argparse.Namespace) -> None:
    # An optimizer step is a batch of rows: what the config says of rollouts has no part in it.
    fixed = ("actor.ppo_mini_batch_size=${data.train_batch_size}", "algorithm.adv_estimator=grpo")
    arguments.overrides = [*arguments.overrides, *fixed, "rollout.n=1", "actor.ppo_epochs=1"]
    config = _load(arguments)
    from mrl.workers.job import serve_as_rank

    if serve_as_rank(config):
        return
    from mrl.sft import SFTTrainer

    SFTTrainer(config, _tokenizer(config)).fit()


def _add_check_layout(check: argparse.ArgumentParser) -> None:
    check.add_argument("config", help="a YAML file; its data files are used where there are any")
    check.add_argument("overrides", nargs="*", metavar="key=value")
    check.add_argument(
        "--layouts",
        nargs="+",
        default=["auto"],
        metavar="LAYOUT",
        help="as tp2pp2, cp2,recompute or config; auto (default): those worth a look",
    )
    check.add_argument(
        "--reference",
        default="tp1,dtype=float32",
        metavar="LAYOUT",
        help="default: one rank in float32",
    )
    check.add_argument("--rows", type=int, metavar="N", help="of the batch; default: 8 or more")
    check.add_argument("--ranks", type=int, metavar="N", help="at most, of an automatic layout")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument(
        "--random-weights",
        action="store_true",
        help="draw the weights of a model folder that has a config.json alone",
    )


def _check_layout(arguments: argparse.Namespace) -> int:
    from mrl.config import load_config

    # what follows --layouts may be an override: its key has a dot, a layout has none
    words = arguments.layouts
    overrides = [word for word in words if "." in word.partition("=")[0]]
    config = load_config(arguments.config, [*arguments.overrides, *overrides])
    from mrl.check_layout.command import Options, run

    options = Options(
        layouts=[word for word in words if word not in overrides] or ["auto"],
        reference=arguments.reference,
        rows=arguments.rows,
        ranks=arguments.ranks,
        json=arguments.json,
        random_weights=arguments.random_weights,
    )
    return run(config, options)


def _add_convert(convert: argparse.ArgumentParser) -> None:
    convert.add_argument("source", help="a Hugging Face folder or a Megatron checkpoint")
    convert.add_argument("target", help="a folder that is not there yet")
    convert.add_argument("--to", choices=("megatron", "hf"), help="default: what SOURCE is not")
    for name, text in (
        ("tp", "tensor-parallel ranks that will load it; any number can, these read least"),
        ("pp", "pipeline stages (checked to fit the model; any number can load it)"),
        ("vpp", "model chunks of a stage (checked, as --pp)"),
        ("ep", "expert-parallel ranks (checked, as --pp)"),
    ):
        convert.add_argument(f"--{name}", type=int, default=1, metavar="N", help=text)
    convert.add_argument("--etp", type=int, metavar="N", help="expert tensor parallel; default TP")
    convert.add_argument("--dtype", help="round to it (default: every tensor keeps its own)")
    convert.add_argument("--max-shard-size", metavar="SIZE", help="of a file, as 5GB (default)")
    convert.add_argument(
        "--keys",
        default="auto",
        help="auto, stacked, per_layer or per_shard: the form that sharded_state_dict() asks for",
    )
    convert.add_argument(
        "--config", metavar="FOLDER", help="config.json and tokenizer of the model"
    )


def _convert(arguments: argparse.Namespace) -> None:
    from pathlib import Path

    from mrl.checkpoint.convert import Options, convert, parse_size

    convert(
        Path(arguments.source),
        Path(arguments.target),
        Options(
            to=arguments.to,
            tp=arguments.tp,
            pp=arguments.pp,
            vpp=arguments.vpp,
            ep=arguments.ep,
            etp=arguments.etp,
            keys=arguments.keys,
            dtype=arguments.dtype,
            max_shard_bytes=arguments.max_shard_size and parse_size(arguments.max_shard_size),
            config=Path(arguments.config) if arguments.config else None,
        ),
    )


def _quickstart(arguments: argparse.Namespace) -> None:
    from mrl.quickstart.run import run

    run(arguments.config, arguments.seed, arguments.overrides)


if __name__ == "__main__":
    sys.exit(main())
