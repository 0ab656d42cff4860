"""Train a Lightning module on any number of processes, configured with Hydra.

    python template.py                                                one process
    horovodrun -np 2 -H localhost:2 python template.py                two on this host
    horovodrun -np 8 -H node1:4,node2:4 python template.py            eight on two hosts
    ... template.py model=denoiser data=noise trainer.max_epochs=3    another job
    ... template.py experiment=denoiser                               a recipe of conf/experiment
    ... template.py ckpt_path=logs/.../last.ckpt                      go on from a checkpoint
    ... template.py ckpt_path=last                                    go on from the newest
    ... template.py train=false ckpt_path=logs/.../last.ckpt          only test it
    ... template.py train=false predict=true ckpt_path=best           and write predictions.pt

`python template.py --help` lists the keys and their values; comments in conf/ explain them. This
file is the same for every model, every data set and every strategy.
"""

import sys

import hydra
import torch
from omegaconf import DictConfig
from pytorch_lightning import LightningDataModule, LightningModule, Trainer, seed_everything

from runs.config import check
from runs.refusal import Refusal, refuse
from runs.run import Run

# preload: above this line only imports, which the ranks of a host share; each runs them again.


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    with Run(config) as run:
        # ------------------------------------------------------------------ where and how
        strategy = run.instantiate("strategy")  # Horovod gives this process its rank here
        seed_everything(config.seed, workers=True)
        torch.set_float32_matmul_precision(config.matmul_precision)
        folder = run.open(strategy)  # logs/<task>/runs/<date>_<time>, checked and made by rank 0

        # ------------------------------------------------------------------ data, model, trainer
        data: LightningDataModule = run.instantiate("data")
        trainer: Trainer = run.instantiate(
            "trainer",
            strategy=strategy,
            default_root_dir=str(folder),
            callbacks=[*(run.instantiate("callbacks") or []), *run.callbacks],
            logger=run.instantiate("logger") or False,
            profiler=run.instantiate("profiler"),
        )
        run.check_ranks(trainer.world_size)
        run.scale_learning_rate(trainer.world_size)  # by lr_scaling
        model: LightningModule = run.instantiate("model")

        # ------------------------------------------------------------------ fit, test, predict
        if config.train:
            trainer.fit(model, data, ckpt_path=config.ckpt_path)
        checkpoint = run.checkpoint(trainer)  # the best that was trained, else that of ckpt_path
        if config.test:
            trainer.test(model, data, ckpt_path=checkpoint, verbose=False)
        if config.predict:
            trainer.predict(model, data, return_predictions=False, ckpt_path=checkpoint)
        run.report.finish(trainer, checkpoint)


if __name__ == "__main__":
    try:
        check(sys.argv[1:])
    except Refusal as refusal:
        refuse(str(refusal))
    main()
