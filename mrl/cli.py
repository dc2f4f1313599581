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
from mrl.launching.command import (
    add_doctor,
    add_launch,
    doctor,
    dry_run,
    launch,
    require_devices,
)

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
    if "config_name" in arguments and (fault := _settle_config(arguments)):
        parser.error(fault)
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
        if error.evidence:
            print(error.evidence, file=sys.stderr)
        print(f"mrl {arguments.command}: {error.cause}", file=sys.stderr)
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
        command.add_argument("config", nargs="?", help="a YAML file; none: verl's defaults")
        command.add_argument("overrides", nargs="*", metavar="key=value")
        command.add_argument("--config-name", help="of a verl command line, in place of CONFIG")
        command.add_argument("--config-path", help="of a verl command line; not used")
        if name == "plan":
            _add_plan(command)
        if name == "train":
            command.add_argument(
                "--dry-run", action="store_true", help="print what each rank would run, and end"
            )
    add_launch(add("launch", launch, "write the Slurm script of a config"))
    add_doctor(add("doctor", doctor, "check this machine, and say what to do about it"))
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
    report = add("report", _report, "one HTML file about a run, or several compared")
    report.add_argument("folders", nargs="+", metavar="RUN_DIR", help="trainer.default_local_dir")
    report.add_argument("--out", metavar="FILE", help="default: report.html, of one run in RUN_DIR")
    watch = add("watch", _watch, "a dashboard of a running or finished run, from its folder alone")
    watch.add_argument("folder", metavar="RUN_DIR", help="its trainer.default_local_dir")
    watch.add_argument("--once", action="store_true", help="print it as it is now, and end")
    bench = add("bench", _bench, "list, run, compare or draw a checkout's benchmarks")
    bench.add_argument("words", nargs=argparse.REMAINDER, metavar="NAME [ARG ...]")
    quickstart = add("quickstart", _quickstart, "the whole way on a laptop: make, warm up, train")
    quickstart.add_argument("overrides", nargs="*", metavar="key=value", help="of the last stage")
    quickstart.add_argument("--config", default="configs/grpo/quickstart.yaml")
    quickstart.add_argument("--seed", type=int, default=1, help="of weights, tasks and sampling")
    return parser


def _settle_config(arguments: argparse.Namespace) -> str:
    """Tell the config file from the overrides: verl's command lines have none. "" or a fault."""
    words = [*([] if arguments.config is None else [arguments.config]), *arguments.overrides]
    given = bool(words) and ("=" not in words[0] or Path(words[0]).is_file())
    arguments.config = words.pop(0) if given else None
    arguments.overrides = words
    name = arguments.config_name
    if name is None:
        return "" if given or words else "the following arguments are required: config"
    if given:
        return f"--config-name {name} and CONFIG {arguments.config}: give one of the two"
    known = ("ppo_megatron_trainer", "ppo_trainer")
    if name.removesuffix(".yaml") not in known:
        return f"--config-name {name}: not one of {', '.join(known)}; give the file as CONFIG"
    return ""


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--explain", action="store_true", help="say what each key comes to")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument("--gpu", default="h100", help="h100 (default), h200 or a100-80")
    plan.add_argument("--network", help="hdr, ndr, xdr, roce-100 or roce-400, one adapter a GPU")
    plan.add_argument(
        "--assume",
        nargs="+",
        action="extend",
        default=[],
        metavar="name=value",
        help="in place of what the plan assumes, as response=0.4 (the mean over the longest)",
    )
    plan.add_argument("--suggest", action="store_true", help="search layouts, print the best five")
    plan.add_argument("--plot", metavar="FILE.png", help="draw memory by phase")


def _plan(arguments: argparse.Namespace) -> None:
    from mrl.config import build_plan, load_config, print_plan
    from mrl.config.explain import explain, load_told, print_explained
    from mrl.planning.shapes import has_shape

    # what follows --assume may be an override: its key has a dot
    words = arguments.assume
    overrides = [word for word in words if "." in word.partition("=")[0]]
    arguments.overrides = [*arguments.overrides, *overrides]
    if arguments.explain:
        print_explained(explain(arguments.config, arguments.overrides))
        config = load_config(arguments.config, arguments.overrides)
    else:
        config = load_told(arguments.config, arguments.overrides, reasons=True)
    if not has_shape(config):  # the numbers that need no model
        plan = build_plan(config)
        if arguments.suggest or arguments.plot is not None:
            raise FileNotFoundError(f"model.path {config.model.path}: no config.json to plan with")
        print(json.dumps(plan.to_json(), indent=1)) if arguments.json else print_plan(plan, config)
        return
    from mrl.planning.hardware import Machine
    from mrl.planning.plan import plan_job
    from mrl.planning.suggest import suggest

    assume = [word for word in words if word not in overrides]
    job = plan_job(config, Machine.named(arguments.gpu, arguments.network, assume))
    found = suggest(job.job) if arguments.suggest else ()
    if arguments.plot is not None:
        from mrl.planning.plot import save_plot

        save_plot(job, Path(arguments.plot))
    if arguments.json:
        suggested = {"suggested": [s.to_json() for s in found]} if arguments.suggest else {}
        print(json.dumps(job.to_json() | suggested, indent=1))
        return
    from mrl.planning.show import print_job, print_suggestions

    print_plan(job.job.plan, config)
    print_job(job)
    if arguments.suggest:
        print_suggestions(found)


def _reshard(arguments: argparse.Namespace) -> None:
    from mrl.config.explain import load_told
    from mrl.resharding.draw import print_report
    from mrl.resharding.report import build_report

    config = load_told(arguments.config, arguments.overrides)
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
    from mrl.config import check_files, check_trainable
    from mrl.config.explain import load_told

    config = load_told(arguments.config, arguments.overrides)
    check_files(config)
    check_trainable(config)
    return config


def _tokenizer(config: Config) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    path = config.model.tokenizer_path or config.model.path
    return AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)


def _train(arguments: argparse.Namespace) -> int | None:
    from mrl.config import build_plan, print_plan

    if arguments.dry_run:
        from mrl.config.explain import load_told

        return dry_run(load_told(arguments.config, arguments.overrides))
    config = _load(arguments)
    require_devices(config)
    from mrl.workers.job import serve_as_rank

    if serve_as_rank(config):  # the data and the console are rank 0's
        return None
    print_plan(build_plan(config), config)
    from mrl.trainer import RayPPOTrainer

    RayPPOTrainer(config, _tokenizer(config)).fit()
    return None


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
    from mrl.config.explain import load_told

    # what follows --layouts may be an override: its key has a dot, a layout has none
    words = arguments.layouts
    overrides = [word for word in words if "." in word.partition("=")[0]]
    config = load_told(arguments.config, [*arguments.overrides, *overrides])
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


def _report(arguments: argparse.Namespace) -> None:
    from mrl.report import write_report

    folders = [Path(folder) for folder in arguments.folders]
    out = (folders[0] if len(folders) == 1 else Path()) / "report.html"
    out = out if arguments.out is None else Path(arguments.out)
    for finding in write_report(folders, out):
        print(f"warning: {finding}")
    print(out)


def _watch(arguments: argparse.Namespace) -> None:
    from mrl.tracking.watch import watch

    watch(Path(arguments.folder), arguments.once)


def _bench(arguments: argparse.Namespace) -> int:
    import importlib

    root = Path(__file__).resolve().parent.parent
    if not (root / "benchmarks" / "run.py").is_file():
        raise FileNotFoundError(
            f"no benchmarks/ in {root}: they are not in the installed package; take a checkout, "
            "install it with `pip install -e .`, and use its mrl"
        )
    sys.path.insert(0, str(root))
    status: int = importlib.import_module("benchmarks.run").main(arguments.words)
    return status


def _quickstart(arguments: argparse.Namespace) -> None:
    from mrl.quickstart.run import run

    run(arguments.config, arguments.seed, arguments.overrides)


if __name__ == "__main__":
    sys.exit(main())
