"""Train Lightning modules under Horovod: `Trainer(strategy=HorovodStrategy())`, or "horovod".

Self-contained: needs torch, Lightning, torchmetrics and Horovod and nothing else of this
repository, so the folder can be copied into another project as it is.
"""

from pytorch_lightning.strategies import StrategyRegistry
from pytorch_lightning.utilities.exceptions import MisconfigurationException

try:
    import horovod.torch as hvd
except ImportError as error:
    raise MisconfigurationException(
        f"Horovod cannot be imported ({error}); build it beside this torch: make install"
    ) from None
if not hasattr(hvd, "init"):  # it prints why and goes on without its operations
    raise MisconfigurationException(
        "Horovod was built without PyTorch, or for another version of it; build it again: "
        "make install"
    )

from strategies.horovod import HorovodStrategy

__all__ = ["HorovodStrategy"]

if "horovod" not in StrategyRegistry:
    StrategyRegistry.register(
        "horovod", HorovodStrategy, description="Data parallel training over Horovod"
    )
