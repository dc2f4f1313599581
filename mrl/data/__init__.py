"""From files to prompts: parquet and jsonl rows, chat templates, a resumable order."""

from mrl.data.dataset import RLHFDataset
from mrl.data.pairs import PreferencePair
from mrl.data.sft import SFTDataset
from mrl.data.stream import PromptStream, StreamState, validation_batches

__all__ = [
    "PreferencePair",
    "PromptStream",
    "RLHFDataset",
    "SFTDataset",
    "StreamState",
    "validation_batches",
]
