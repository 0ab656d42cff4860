"""Train Lightning modules under Horovod: `Trainer(strategy=HorovodStrategy())`, or "horovod".

Self-contained: needs torch, Lightning, torchmetrics and Horovod and nothing else of this
repository, so the folder can be copied into another project as it is.
"""

from pytorch_lightning.strategies import StrategyRegistry

from strategies.horovod import HorovodStrategy

__all__ = ["HorovodStrategy"]

if "horovod" not in StrategyRegistry:
    StrategyRegistry.register(
        "horovod", HorovodStrategy, description="Data parallel training over Horovod"
    )
