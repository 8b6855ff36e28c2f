"""naive-mlsm: mlsm at the cost of mtl."""

from shards.reader import Store
from student.objectives.mlsm import Mlsm


class NaiveMlsm(Mlsm):
    """MLSM on the last k of V + k outputs. The other V are computed but not used, so that costs can be compared.

    The output layer is that of mtl, tied or not.
    """

    name = "naive-mlsm"
    behind_vocabulary = True
    tied = True

    def set_up(self, store: Store) -> None:
        super().set_up(store)
        self.tied = not self.untied
