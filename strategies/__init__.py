"""Train Lightning modules under Horovod: `Trainer(strategy=HorovodStrategy())`, or "horovod".

Self-contained: needs torch, Lightning, torchmetrics and Horovod (with cloudpickle, which comes with
it) and nothing else of this repository, so the folder can be copied into another project as it is.
"""

import warnings

import pytorch_lightning as pl
from pytorch_lightning.strategies import StrategyRegistry
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

try:
    import horovod.torch as hvd
except ImportError as error:
    raise MisconfigurationException(
        f"Horovod cannot be imported ({error}); build it beside this torch (here: make install)"
    ) from None
if not hasattr(hvd, "init"):  # the import prints why, and goes on without Horovod's operations
    raise MisconfigurationException(
        "Horovod was built without PyTorch, or for another version of it; build it again (here: "
        "make install)"
    )

from .horovod import HorovodStrategy

__all__ = ["HorovodStrategy"]

LIGHTNING = "2.6"  # private parts of its loops, loaders and results are used
if not pl.__version__.startswith(f"{LIGHTNING}."):
    rank_zero_warn(
        f"HorovodStrategy is tested with Lightning {LIGHTNING}, and this is {pl.__version__}: "
        "compare what it trains with one process before you rely on it"
    )
# Lightning says so of every Trainer where Slurm is installed; processes of srun are refused here.
warnings.filterwarnings("ignore", ".*srun. command is available.*")
if "horovod" not in StrategyRegistry:
    StrategyRegistry.register(
        "horovod", HorovodStrategy, description="Data parallel training over Horovod"
    )
