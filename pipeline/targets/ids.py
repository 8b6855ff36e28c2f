"""Stores of only token ids, which are enough for the `mlm` objective."""

from typing import Self

from pipeline.config import EncodeIdsConfig
from pipeline.job import Job
from shards.files import StoreFiles
from shards.schema import FORMAT_VERSION


class Ids:
    """A store of only token ids."""

    def __init__(self, config: EncodeIdsConfig):
        self.config = config

    @staticmethod
    def load_teacher(job: Job) -> None:
        return None

    @classmethod
    def open(cls, job: Job, teacher: None, files: StoreFiles, settings: dict) -> Self:
        return cls(job.config)

    def describe_store(self, job: Job) -> tuple[str, dict]:
        settings = {"kind": "ids", "format": FORMAT_VERSION, "windowing": job.rules}
        lineage = {"tokenizer_name": self.config.tokenizer}
        return f"ids-L{self.config.max_length}", job.target_json(settings, lineage)

    def save_copies(self, files: StoreFiles) -> None:
        pass
