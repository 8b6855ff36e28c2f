"""naive-mlsm: mlsm at the cost of mtl."""

from shards.reader import Store
from student.objectives.mlsm import Mlsm


class NaiveMlsm(Mlsm):
    """MLSM as a slice of an output layer of V + k columns, the others computed and not used: for comparing costs.

    The output layer is that of mtl, tied or not.
    """

    name = "naive-mlsm"
    behind_vocabulary = True
    tied = True

    def set_up(self, store: Store) -> None:
        super().set_up(store)
        self.tied = not self.untied
