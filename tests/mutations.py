"""Break the code in one place at a time, and see tests fail: a proof that they look.

    make test-mutations                 all, about an hour on two cores
    make test-mutations ARGS="metrics"  those whose name has this in it

Each mutation is made in a copy of the repository. It names the tests that must fail; that those
pass on the code as it is, is what `make test` shows. A text that is no longer there is an error.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Mutation:
    """`old` becomes `new` in `file`; then `tests`, as for pytest -k, must fail in `module`."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    module: str = "test_matrix"
    folder: str = "strategies"


MUTATIONS = [
    Mutation(
        "gradients are not averaged", "horovod.py",
        "        if self._combines:\n            # Where", "        if False:\n            # Where",
        "horovod-2 and plain",
    ),
    Mutation(
        "gradients are added where they should be averaged", "horovod.py",
        "= (1 / divisor,", "= (1,", "horovod-2 and plain",
    ),
    Mutation(
        "a rank without any batch is not looked for", "horovod.py",
        "refuse_unequal(0 if loop._data_fetcher.done else 1, self.optimizers, self.world)", "pass",
        "mistakes_are_told", "test_mistakes",
    ),
    Mutation(
        "ranks that go on come to a collective before they are told", "collectives.py",
        "        self.run_deferred_check()\n        if batch", "        if batch",
        "end_apart", "test_mistakes",
    ),
    Mutation(
        "the model is not broadcast", "horovod.py",
        "self._share_model(sent=set())", "pass",
        "horovod-2 and plain",
    ),
    Mutation(
        "all ranks draw the same in their steps", "randomness.py",
        "generator=shared)) + rank", "generator=shared))", "draws_for_itself", "test_randomness",
    ),
    Mutation(
        "what a rank draws in its steps moves what it draws outside", "randomness.py",
        "torch.set_rng_state(state)", "pass", "draws_for_itself", "test_randomness",
    ),
    Mutation(
        "data sets draw again what they drew before a resume", "horovod.py",
        "            draw_others(step)", "            pass",
        "draw_other_numbers", "test_randomness",
    ),
    Mutation(
        "loaders beside each other are counted by one of them", "evaluation.py",
        'return min(counts) if combined._mode == "min_size" else max(counts)',
        "return counts[dataloader_idx]", "several_loaders or beside_each", "test_evaluation",
    ),
    Mutation(
        "a sampler that deals in its own way is dealt out anew", "samplers.py",
        "if not wrapped and type(sampler).__iter__ is not DistributedSampler.__iter__:",
        "if False:", "own_way", "test_evaluation",
    ),
    Mutation(
        "a sampler of all samples is dealt out", "samplers.py",
        "ours = (sampler.num_replicas, sampler.rank) == (world.size, world.rank)", "ours = True",
        "own_way", "test_evaluation",
    ),
    Mutation(
        "data sets of other lengths are split over the ranks", "horovod.py",
        "            refuse_other_lengths(dataloader, self.world)", "            pass",
        "told_on_all_ranks", "test_mistakes",
    ),
    Mutation(
        "layers that have moved send their gradients after backward", "buckets.py",
        "if held is None or held[0] is not node:", "if held is None:",
        "that_have_moved", "test_strategy",
    ),
    Mutation(
        "a resume counts in the batches of the first epoch", "horovod.py",
        "size = global_batch_size(trainer.fit_loop, self.world.size)",
        "size = 2 * self.world.size",
        "counts_in_the_batches", "test_resuming",
    ),
    Mutation(
        "copies made when training begins keep plain batch normalization", "horovod.py",
        "self._layer_sync.apply(self._module, refuse=False)", "pass",
        "horovod-2 and of_a_teacher",
    ),
    Mutation(
        "losses that gather by themselves are not looked for", "horovod.py",
        "                warn_of_own_gathers(module)\n", "",
        "gone_apart", "test_strategy",
    ),
    Mutation(
        "what ranks have moved apart is not looked at", "horovod.py",
        "self._drift_found = warn_of_drift(self._module, self.world, buffers)", "pass",
        "gone_apart", "test_strategy",
    ),
    Mutation(
        "buffers are broadcast before a callback has put its weights in", "evaluation.py",
        "batches not in (0, math.inf)", "False",
        "running_means", "test_evaluation",
    ),
    Mutation(
        "a resume takes the end of an epoch for a place in it", "resuming.py",
        "move(progress, loop.max_batches - progress.current.ready)", "pass",
        "resume_at_the_end", "test_resuming",
    ),
    Mutation(
        "what configure_optimizers makes is each rank's own", "horovod.py",
        "self._share_model(sent)", "pass",
        "horovod-2 and made_by_configure_optimizers",
    ),
    Mutation(
        "a step that takes an iterator draws its batches apart", "horovod.py",
        "with nullcontext() if by_iterator else self._draws():", "with self._draws():",
        "asks_for_its_batches", "test_randomness",
    ),
    Mutation(
        "steps that pass Lightning by are not looked at", "steps.py",
        "optimizer.register_step_pre_hook(self._before_step)",
        "optimizer.register_step_pre_hook(str)", "mistakes", "test_mistakes",
    ),
    Mutation(
        "what is frozen within a window stays one rank's own", "buckets.py",
        "        if self._local:", "        if False:", "horovod-2 and frozen_within",
    ),
    Mutation(
        "a gradient that is toggled off counts as there", "buckets.py",
        "        if not parameter.requires_grad:\n            return",
        "        if False:\n            return", "horovod-2 and losses_come_first",
    ),
    Mutation(
        "lists of metrics have what fills them up in them", "metrics.py",
        "if i // ranks < lengths[i % ranks]", "if True",
        "horovod-2 and sampler_of_ones_own",
    ),
    Mutation(
        "a progress bar reads metrics on one rank", "horovod.py",
        "                read_by_all(trainer, self.world)\n", "", "horovod-2 and progress_bar",
    ),
    Mutation(
        "metrics made when training starts stay a rank's own", "horovod.py",
        "        self._share_metrics()\n        loop", "        loop",
        "made_in_hooks and horovod-2",
    ),
    Mutation(
        "metrics made when an epoch starts stay a rank's own", "horovod.py",
        "            self._share_metrics()\n            # Before", "            # Before",
        "made_in_hooks and horovod-2",
    ),
    Mutation(
        "metrics made when a validation starts stay a rank's own", "horovod.py",
        "        self._share_metrics()\n        if not self._drift", "        if not self._drift",
        "made_in_hooks and horovod-2",
    ),
    Mutation(
        "metrics that nobody has computed stay a rank's own", "metrics.py",
        "        if any(is_left for _, is_left in of_ranks):", "        if False:",
        "nobody_has_computed", "test_strategy",
    ),
    Mutation(
        "values of a training epoch are not compared", "metrics.py",
        "        warn_of_own_values(trainer, self.world)", "        pass",
        "told_once", "test_evaluation",
    ),
    Mutation(
        "webdataset finds one rank", "horovod.py",
        "            os.environ.update(", "            dict(", "webdataset", "test_strategy",
    ),
    Mutation(
        "a sampler of training is changed by an evaluation", "samplers.py",
        "    share = copy.copy(sampler)\n", "    share = sampler\n",
        "orders_of_its_own", "test_evaluation",
    ),
    Mutation(
        "what ranks draw moves what all share", "randomness.py",
        "torch.randint(2**62, (), generator=shared)", "torch.randint(2**62, ())",
        "move_nothing", "test_randomness",
    ),
    Mutation(
        "what is ignored since the last time is deleted on other hosts", "sync.py",
        "for file in _patterns()", "for file in ()",
        "ignored_since", "cluster/test_sync", "cluster",
    ),
    Mutation(
        "what git tracks stays here where it is ignored", "sync.py",
        "    lost = (", "    lost = set() and (",
        "git_tracks", "cluster/test_sync", "cluster",
    ),
    Mutation(
        "a second request to stop ends the run at once", "horovodrun.py",
        "if number == AT_ONCE or (self._signals > 1 and number == signal.SIGINT):",
        "if self._signals > 1:", "another_stop", "cluster/test_detached", "cluster",
    ),
    Mutation(
        "buffers stay apart though asked for", "horovod.py",
        "        if self.broadcast_buffers and", "        if False and",
        "gone_apart", "test_strategy",
    ),
    Mutation(
        "buffers are not broadcast before an evaluation", "evaluation.py",
        "self.world.broadcast(shared_buffers(module, self.world))", "pass",
        "running_means", "test_evaluation",
    ),
    Mutation(
        "buffers are shared that some ranks lack", "buffers.py",
        "    if smallest == -largest:\n", "    if True:\n",
        "let_grow", "test_evaluation",
    ),
    Mutation(
        "after an error a rank waits for others", "horovod.py",
        "return trainer is not None and trainer.interrupted and trainer.state.stage is not None",
        "return False", "exception_on_one_rank", "test_strategy",
    ),
    Mutation(
        "loaders that go on by themselves begin anew", "resuming.py",
        "    if states:\n", "    if False:\n", "by_themselves", "test_resuming",
    ),
    Mutation(
        "a gradient is the view that is sent, and moves it", "buckets.py",
        "                parameter.grad = view.data\n", "                parameter.grad = view\n",
        "other_memory and horovod-2",
    ),
    Mutation(
        "gradients keep to the strides that weights had at first", "buckets.py",
        "if gradient.stride() != view.stride():", "if False:", "other_strides and horovod-2",
    ),
    Mutation(
        "the gradient of a tied embedding is sparse", "buckets.py",
        "whole.to_dense() if dense else whole", "whole", "of_a_dense_layer and horovod-2",
    ),
    Mutation(
        "lists with a reduction of one's own have to be equally long", "metrics.py",
        "if reduction is not dim_zero_cat and", "if reduction is None and",
        "metrics_of_9 and horovod-2",
    ),
    Mutation(
        "a backward goes on after one that ended in an error", "buckets.py",
        "        if self.in_backward:\n            raise", "        if False:\n            raise",
        "mistakes_are_told", "test_mistakes",
    ),
    Mutation(
        "a batch of None is left out", "horovod.py",
        "if batch is None and ", "if False and ", "without_a_batch", "test_strategy",
    ),
    Mutation(
        "the optimizer's state is not broadcast", "horovod.py",
        "zip(self.optimizers, self.broadcast(states))", "zip(self.optimizers, states)",
        "optimizer_state", "test_strategy",
    ),
    Mutation(
        "each batch of an accumulation is reduced", "horovod.py",
        "        self._combines = False\n", "        self._combines = True\n",
        "horovod-2 and accumulation",
    ),
    Mutation(
        "a gradient that no rank has becomes zero", "buckets.py",
        "            if used_somewhere[index]:\n", "            if True:\n",
        "horovod-2 and nobody_uses",
    ),
    Mutation(
        "a gradient that this rank has not stays away", "buckets.py",
        "            if used_somewhere[index]:\n", "            if index not in bucket.unused:\n",
        "horovod-2 and some_ranks_use",
    ),
    Mutation(
        "gradients of an earlier backward are added up again", "buckets.py",
        "        self._reduced.update(bucket.parameters)\n", "", "horovod-2 and of_a_sum",
    ),
    Mutation(
        "gradients are not divided where they are copied", "buckets.py",
        "fill(views, gradients, self.before)", "fill(views, gradients, 1)",
        "horovod-2 and plain",
    ),
    Mutation(
        "gradients of an earlier backward keep the factor of their last reduction", "buckets.py",
        "1 / (self.before * self.after * self.world.size)", "1 / self.world.size",
        "horovod-2 and that_accumulate",
    ),
    Mutation(
        "gradients that a backward left alone are forgotten", "buckets.py",
        "self._reduced = {p for p in self._reduced if not p.requires_grad}",
        "self._reduced = set()", "horovod-2 and of_a_sum",
    ),
    Mutation(
        "a backward that trains nothing ends an epoch", "buckets.py",
        "        votes[-1 if self._last_batch else -2] = 0\n", "",
        "horovod-2 and nothing_trained",
    ),
    Mutation(
        "gradients that this backward leaves alone are added up too", "buckets.py",
        "if parameter.requires_grad and parameter.grad is", "if parameter.grad is",
        "horovod-2 and of_a_sum",
    ),
    Mutation(
        "workers that persist go on with the old batches", "samplers.py",
        "if dataloader._iterator is not None:", "if False:", "made_before_it", "test_resuming",
    ),
    Mutation(
        "toggled parameters share buckets with others", "buckets.py",
        "if not self.buckets or cut:", "if not self.buckets:", "toggled", "test_properties",
    ),
    Mutation(
        "sparse gradients stay one rank's own", "buckets.py",
        "            self._gather(parameter, name)", "            pass",
        "horovod-2 and sparse",
    ),
    Mutation(
        "buckets leave only after backward", "buckets.py",
        "        if not bucket.missing:\n", "        if False:\n",
        "horovod-2 and many_buckets",
    ),
    Mutation(
        "the next step of a reduction waits for backward", "buckets.py",
        "        if self._in_steps:\n", "        if False:\n", "no_bucket_waits", "test_properties",
    ),
    Mutation(
        "a bucket that is late holds up the others", "buckets.py",
        "trained[index:] if self._in_steps else [bucket]", "[bucket]",
        "no_bucket_waits", "test_properties",
    ),
    Mutation(
        "a second gradient in one backward is taken", "buckets.py",
        "if parameter in self._seen:\n            raise", "if False:\n            raise",
        "mistakes", "test_mistakes",
    ),
    Mutation(
        "a predivided gradient is not brought back", "buckets.py",
        "if self.after != 1:", "if False:", "horovod-2 and predivide",
    ),
    Mutation(
        "16 bits lose a rank's part", "reductions.py",
        ".sum(0, dtype=torch.float32)", "[0].float()", "horovod-2 and compression_in_pieces",
    ),
    Mutation(
        "Adasum only adds", "reductions.py",
        "torch.where(square > 0, 1 - dot / (2 * square), 1.0)", "1", "horovod-2 and adasum",
    ),
    Mutation(
        "a sum is an average", "horovod.py",
        'averaged = self.op == "average"', "averaged = True", "horovod-2 and sum_of_gradients",
    ),
    Mutation(
        "batch normalization uses this rank's statistics", "batchnorm.py",
        "layer.__class__ = _synchronous(type(layer))", "pass", "horovod-2 and sync_batchnorm",
    ),
    Mutation(
        "its gradients ignore the other ranks", "batchnorm.py",
        "torch.stack([grad_bias, grad_weight])", "torch.zeros(2, len(inverse))",
        "horovod-2 and sync_batchnorm",
    ),
    Mutation(
        "its running variance is not that of a sample", "batchnorm.py",
        "variance * count / (count - 1)", "variance", "horovod-2 and sync_batchnorm",
    ),
    Mutation(
        "torchmetrics sees one rank", "horovod.py",
        "            synchronize_metrics(self._module, self.world)", "            pass",
        "horovod-2 and even_shares",
    ),
    Mutation(
        "sync_dist reduces nothing", "horovod.py",
        "if not isinstance(tensor, Tensor) or self._by_itself:", "if True:",
        "horovod-2 and even_shares",
    ),
    Mutation(
        "the mean of integers is cut to an integer", "collectives.py",
        "return reduced if mean_of_integers else", "return", "collectives", "test_collectives",
    ),
    Mutation(
        "evaluation repeats samples", "horovod.py",
        "dataloader = each_sample_once(dataloader, self.world, stage)", "pass",
        "horovod-2 and 9_samples",
    ),
    Mutation(
        "samplers of one's own draw what each rank draws", "samplers.py",
        "torch.default_generator.manual_seed(seed)", "pass", "samplers_of_ones_own",
        "test_randomness",
    ),
    Mutation(
        "the order of a sampler of one's own is shuffled", "samplers.py",
        "        sampler.shuffle = False\n", "", "samplers_of_ones_own", "test_randomness",
    ),
    Mutation(
        "a layer that keeps its statistics is given others", "batchnorm.py",
        "if self.track_running_stats and", "if", "keeps_its_statistics and horovod-2",
    ),
    Mutation(
        "running means that callbacks put in are not shared", "horovod.py",
        "[*others, self._evaluation]", "[self._evaluation, *others]",
        "running_means", "test_evaluation",
    ),
    Mutation(
        "a batch of the sanity check is taken for a later one", "evaluation.py",
        " and trainer.sanity_checking == sanity", "", "several_loaders", "test_evaluation",
    ),
    Mutation(
        "batches of later loaders are counted on", "evaluation.py",
        "dataloader_idx, batch_idx = of_loader(batch_idx, loop.max_batches)", "pass",
        "several_loaders", "test_evaluation",
    ),
    Mutation(
        "each rank draws an order of its own", "samplers.py",
        "world.broadcast_object([order[index] for index in range(len(order))])",
        "[order[index] for index in range(len(order))]", "orders_of_its_own", "test_evaluation",
    ),
    Mutation(
        "an evaluation changes the loader of training", "samplers.py",
        "once = copy.copy(loader)", "once = loader",
        "orders_of_its_own", "test_evaluation",
    ),
    Mutation(
        "gradients are strided otherwise than parameters", "layout.py",
        "torch.empty_like(parameter, device", "torch.empty(parameter.shape, device",
        "horovod-2 and fused",
    ),
    Mutation(
        "a line search goes by this rank's loss", "steps.py",
        "return self._combine(loss) if isinstance(optimizer, LBFGS) else loss", "return loss",
        "horovod-2 and line_search",
    ),
    Mutation(
        "learning rates are not compared", "refusals.py",
        "if theirs != ranks[0][1]:", "if False:", "mistakes_are_told", "test_mistakes",
    ),
    Mutation(
        "an optimizer may have parameters of its own", "refusals.py",
        "if parameter not in known:", "if False:",
        "mistakes_are_told", "test_mistakes",
    ),
    Mutation(
        "a rank that failed waits for the others", "horovod.py",
        "        if not self._by_itself:\n            self.world.barrier()",
        "        if self.world.size > 1:\n            self.world.barrier()",
        "exception_on_one", "test_strategy",
    ),
    Mutation(
        "a sampler of one's own is not asked", "samplers.py",
        "if order is None else [order[index] for index in batch]", "",
        "horovod-2 and ones_own",
    ),
    Mutation(
        "pieces of 16 bits change places", "reductions.py",
        "zip(pieces, gathered)", "zip(pieces, gathered[::-1])", "horovod-2 and in_pieces",
    ),
    Mutation(
        "of a large tensor only the first piece is broadcast", "collectives.py",
        "pieces = raw.split(MOST_BYTES)", "pieces = raw.split(MOST_BYTES)[:1]",
        "test_collectives", "test_collectives",
    ),
    Mutation(
        "Horovod asks all ranks all the time", "environment.py",
        '"HOROVOD_IDLE_TIME": "100"', '"HOROVOD_IDLE_TIME": "0"',
        "nothing_to_do", "test_collectives",
    ),
    Mutation(
        "a proven disagreement is passed over", "horovod.py",
        "        raise MisconfigurationException(\n            \"for some",
        "        str(\n            \"for some",
        "mistakes", "test_mistakes",
    ),
    Mutation(
        "gradients of a gather stay one rank's own", "collectives.py",
        'world.reduce(rows, "sum")[world.rank]', "rows[world.rank]", "test_collectives",
        "test_collectives",
    ),
    Mutation(
        "a gather loses the order of ranks", "collectives.py",
        "            return gathered\n", "            return gathered[::-1]\n",
        "gathers_of_any", "test_properties",
    ),
    Mutation(
        "ranks that share a core ask as often as others", "collectives.py",
        "max(1, hvd.local_size() / usable_cores())", "1", "who_waits", "test_collectives",
    ),
    Mutation(
        "the hosts of a process set are those of all", "collectives.py",
        "return list(dict.fromkeys(hosts)).index(hosts[self.rank]) if hosts else hvd.cross_rank()",
        "return hvd.cross_rank()", "sets_train_apart", "test_strategy",
    ),
    Mutation(
        "a training loader made in the sanity check is one to evaluate", "horovod.py",
        "for_training = trainer.sanity_checking and made", "for_training = False",
        "counted_early", "test_strategy",
    ),
    Mutation(
        "the barrier lets pass", "collectives.py",
        "        token = torch.zeros(1, dtype=torch.float32)\n", "        return\n",
        "barrier", "test_collectives",
    ),
    Mutation(
        "a resumed epoch begins anew", "resuming.py",
        "replace_batches(dataloader, WithoutFirst(batches, of_round))", "pass",
        "horovod-2 and resume",
    ),
    Mutation(
        "a batch whose step failed is left out by a resume", "resuming.py",
        "done, moved = progress.current.processed, 0", "done, moved = progress.current.ready, 0",
        "failed_within_an_epoch", "test_resuming",
    ),
    Mutation(
        "a validation that failed goes on in its midst", "resuming.py",
        "loop.epoch_loop.val_loop.batch_progress.current.reset()", "pass",
        "failed_within_an_epoch", "test_resuming",
    ),
    Mutation(
        "workers go on with the order of the first epoch", "resuming.py",
        "    iter(loop._data_fetcher)\n", "", "loaders_were_made", "test_resuming",
    ),
    Mutation(
        "on_after_backward sees the gradients of its own rank", "horovod.py",
        "            self.post_backward(loss)\n",
        "            self._module.on_after_backward()\n"
        "            self.post_backward(loss)\n",
        "horovod-2 and after_backward",
    ),
    Mutation(
        "the time of an exchange counts again in the next step", "horovod.py",
        "        self._buckets.exchanges.clear()\n", "", "planted", "test_anatomy",
    ),
    Mutation(
        "pauses of backward are the network's", "buckets.py",
        "        if not self._on_the_wire:\n", "        if self._busy is None:\n",
        "pauses_of_backward", "test_anatomy",
    ),
    Mutation(
        "a GPU is asked for a time that it has not reached", "clock.py",
        "    second.synchronize()\n", "", "moments_are_events", "test_anatomy",
    ),
    Mutation(
        "a GPU that waits for the program is said to compute", "bottleneck.py",
        "if keeps_up >= STARVED:", "if False:",
        "waits_for_the_program", "test_anatomy", "runs",
    ),
    Mutation(
        "what the slowest rank waits is the network's", "bottleneck.py",
        "steps[:, :, ALL_REDUCE].min(0).values", "steps[:, :, ALL_REDUCE].max(0).values",
        "waits_least", "test_anatomy", "runs",
    ),
    Mutation(
        "each rank takes the checkpoint from its own file system", "horovod.py",
        "checkpoint = self.broadcast(checkpoint)", "pass",
        "horovod-2 and resume",
    ),
    Mutation(
        "models are not compared", "horovod.py",
        "        refuse_other_models(module, self.world)\n", "", "mistakes", "test_mistakes",
    ),
    Mutation(
        "the end of an epoch is not told to others", "buckets.py",
        "bucket.flags[-1 if self._last_batch else -2].zero_()", "bucket.flags[-1].zero_()",
        "mistakes", "test_mistakes",
    ),
    Mutation(
        "all ranks work together, whatever set they are in", "environment.py",
        "    if not sets:\n        return World", "    if True:\n        return World",
        "process_sets", "test_strategy",
    ),
    Mutation(
        "the rendezvous serves everyone", "rendezvous.py",
        "if not hmac.compare_digest(secret, self._rendezvous.secret.encode()):", "if False:",
        "refuses_others", "cluster/test_hosts", "cluster",
    ),
    Mutation(
        "the rendezvous lets nobody wait", "rendezvous.py",
        "rendezvous.loop.call_later(WAIT_SECONDS,", "rendezvous.loop.call_later(0,",
        "too_early_waits", "cluster/test_hosts", "cluster",
    ),
    Mutation(
        "the rendezvous picks the address for another rank", "rendezvous.py",
        "rank if rank < other else rank - 1", "rank - 1",
        "picks_the_addresses", "cluster/test_hosts", "cluster",
    ),
    Mutation(
        "ranks have as few files as a login starts with", "agent.py",
        "        allow_files()\n", "", "files_as_may_be_open", "cluster/test_starting", "cluster",
    ),
    Mutation(
        "a path is split at its blanks on other hosts", "sync.py",
        '"-azs"', '"-az"', "path_with_blanks", "cluster/test_sync", "cluster",
    ),
    Mutation(
        "ranks start where they cannot find each other", "agent.py",
        'check_way(job["launcher"], int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"]))', "pass",
        "does_not_reach_is_told", "cluster/test_ending", "cluster",
    ),
    Mutation(
        "what a rank leaves behind is read to its end", "agent.py",
        "while left >= 0 and", "while", "ends_that_are_rare", "cluster/test_ending", "cluster",
    ),
    Mutation(
        "tokens are forwarded", "forwarding.py",
        "name.startswith(FORWARDED) and not any(word in name for word in SECRET)", "True",
        "listed_variables", "cluster/test_hosts", "cluster",
    ),
    Mutation(
        "a rank sees all GPUs of its host", "ranks.py",
        'variables["CUDA_VISIBLE_DEVICES"] = self.host.gpus[self.local_rank]', "pass",
        "is_read", "cluster/test_hosts", "cluster",
    ),
    Mutation(
        "an agent outlives its launcher", "agent.py",
        "            self._end_all(3)\n            os._exit(1)", "            time.sleep(600)",
        "host_is_cut_off", "cluster/test_ending", "cluster",
    ),
    Mutation(
        "ranks outlive their agent", "agent.py",
        "PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)", "pass",
        "agent_is_killed", "cluster/test_ending", "cluster",
    ),
    Mutation(
        "nobody listens for signs of life", "horovodrun.py",
        "if silent > self._silence and", "if False and",
        "host_is_cut_off", "cluster/test_ending", "cluster",
    ),
    Mutation(
        "a launcher that was suspended takes all hosts for dead", "horovodrun.py",
        "if now - self._stepped > STOPPED_SECONDS:", "if False:",
        "is_suspended", "cluster/test_ending", "cluster",
    ),
    Mutation(
        "an agent that is asked to end just ends", "agent.py",
        "signal.signal(signal.SIGTERM, self._ask_to_stop)", "pass",
        "asks_for_a_checkpoint", "cluster/test_stopping", "cluster",
    ),
    Mutation(
        "what another launcher has left goes to other hosts", "horovodrun.py",
        "forwarded(dict(os.environ)) | ours", "ours | forwarded(dict(os.environ))",
        "what_the_launcher_says", "cluster/test_starting", "cluster",
    ),
    Mutation(
        "the GPUs of a host are not tried together", "doctor.py",
        "if host in with_gpus and host.slots > 1]", "if False]",
        "tried_together", "cluster/test_doctor", "cluster",
    ),
    Mutation(
        "more ranks than GPUs are not refused", "environment.py",
        "if ranks > gpus:", "if False:", "TestDevices", "test_strategy",
    ),
    Mutation(
        "nobody is asked for a checkpoint", "horovodrun.py",
        'connection.send(signal="SIGUSR1")', "pass", "nobody_reads",
        "cluster/test_stopping", "cluster",
    ),
    Mutation(
        "Ctrl-C cuts other hosts off before they are asked for a checkpoint", "connection.py",
        "host.command(script), start_new_session=True,", "host.command(script),",
        "launcher_is_stopped", "cluster/test_stopping", "cluster",
    ),
    Mutation(
        "make stop does not wait for a checkpoint", "jobs.py",
        'state["stop_seconds"] + END_SECONDS', "END_SECONDS",
        "does_not_end_is_killed", "cluster/test_record", "cluster",
    ),
    Mutation(
        "a closed terminal ends a job under nohup", "horovodrun.py",
        "            if signal.getsignal(number) != signal.SIG_IGN:\n"
        "                signal.signal(number, self._on_signal)",
        "            signal.signal(number, self._on_signal)",
        "nohup_and_ctrl_z", "cluster/test_stopping", "cluster",
    ),
    Mutation(
        "all pauses of a launcher together are its silence", "agent.py",
        "                waited = 0\n", "", "last_sign_on", "cluster/test_ending", "cluster",
    ),
    Mutation(
        "an agent that nobody reads stays with its ranks", "agent.py",
        "telling.join(timeout=1)", "telling.join()",
        "nobody_reads_ends", "cluster/test_ending", "cluster",
    ),
    Mutation(
        "a rank that was killed explains no more than those that miss it", "horovodrun.py",
        "cause = Cause.RANK_KILLED if code in KILLED else", "cause =",
        "explains_most", "cluster/test_ending", "cluster",
    ),
    Mutation(
        "who has read nothing keeps a job that has ended, whatever is typed", "horovodrun.py",
        "signal.signal(number, self._hurry)", "pass",
        "ctrl_c_ends", "cluster/test_printing", "cluster",
    ),
    Mutation(
        "an all-reduce that hangs keeps the doctor", "doctor.py",
        "        process.terminate()\n", "",
        "all_reduce_that_hangs", "cluster/test_doctor", "cluster",
    ),
    Mutation(
        "make launch forgets the host file", "hostfile.py",
        'line + (["--hostfile", arguments.hostfile] if arguments.hostfile else [])', "line",
        "until_its_time", "cluster/test_record", "cluster",
    ),
    Mutation(
        "what a user ignores everywhere is deleted on other hosts", "sync.py",
        'user or f"{config}/git/ignore"', 'user or "/nowhere"',
        "ignores_everywhere", "cluster/test_sync", "cluster",
    ),
    Mutation(
        "code beside a file that is ignored and tracked is not copied", "sync.py",
        "sorted(folders - copied)", "sorted(folders)",
        "git_tracks", "cluster/test_sync", "cluster",
    ),
    Mutation(
        "an environment elsewhere is copied over another", "sync.py",
        "if ROOT not in folder.parents:", "if False:",
        "environment_elsewhere", "cluster/test_sync", "cluster",
    ),
    Mutation(
        "any source of Horovod is compiled and run", "wheel.py",
        " --hash=sha256:{SOURCE_SHA256}", "", "known_source", "test_install", "cluster",
    ),
    Mutation(
        "a Horovod without NCCL is taken for one with it", "install.py",
        '["NCCL"] * bool(info["cuda"])', "[]", "without_nccl_is_not", "test_install", "cluster",
    ),
    Mutation(
        "a reader who pauses keeps ranks from their checkpoint", "horovodrun.py",
        "self.record.hurries = self._ends()", "pass",
        "reader_who_pauses", "cluster/test_printing", "cluster",
    ),
    Mutation(
        "what a reader who pauses has not read fills the memory", "connection.py",
        "if holds != self._holds:", "if False:",
        "reader_who_pauses", "cluster/test_printing", "cluster",
    ),
    Mutation(
        "a stop whose checkpoint failed is like others", "horovodrun.py",
        "if self._unsaved:", "if False:", "fails_at_a_stop", "cluster/test_stopping", "cluster",
    ),
    Mutation(
        "a run of another container with this host's name is lost", "record.py",
        'return name if space == "pid:[4026531836]" else', "return name if space else",
        "another_container", "cluster/test_record", "cluster",
    ),
    Mutation(
        "what a terminal does not take at once is lost", "record.py",
        "except BlockingIOError:", "except ZeroDivisionError:",
        "does_not_wait_for", "cluster/test_printing", "cluster",
    ),
    Mutation(
        "a step takes gradients that one rank has for itself", "buckets.py",
        "(self.kept if self.in_backward else self.unprepared).add(parameter)", "pass",
        "mistakes_are_told", "test_mistakes",
    ),
    Mutation(
        "a step takes gradients that stayed local", "steps.py",
        "self._buckets.unprepared or self._buckets.kept", "self._buckets.unprepared",
        "mistakes_are_told", "test_mistakes",
    ),
    Mutation(
        "a step takes what a backward that stayed local has scaled down", "buckets.py",
        "self.kept.add(parameter)  #", "pass  #", "mistakes_are_told", "test_mistakes",
    ),
    Mutation(
        "gradients that stayed local count as such when they are averaged", "buckets.py",
        "        self.kept.clear()", "        pass", "horovod-2 and of_which_one_accumulates",
    ),
    Mutation(
        "a step is made within backward", "steps.py",
        "if self._buckets.in_backward:", "if False:", "mistakes_are_told", "test_mistakes",
    ),
    Mutation(
        "hooks of a parameter that come late run behind the average", "buckets.py",
        "hook = node.register_hook(partial(self._gradient_is_there, parameter))",
        "hook = parameter.register_post_accumulate_grad_hook(self._gradient_is_there)",
        "horovod-2 and replaced_by_hooks",
    ),
    Mutation(
        "forked ranks are left when their agent is killed", "preload.py",
        "    die_with_parent()", "    pass",
        "end_with_their_agent", "cluster/test_preload", "cluster",
    ),
    Mutation(
        "ranks see their host's variables too late", "agent.py",
        "dict(set.intersection(*by_rank))", "{}",
        "with_the_hosts_variables", "cluster/test_preload", "cluster",
    ),
    Mutation(
        "ranks wait for OpenMP threads that only their parent had", "preload.py",
        "omp_pause_resource_all(PAUSE_HARD)", "omp_pause_resource_all",
        "with_the_hosts_variables", "cluster/test_preload", "cluster",
    ),
    Mutation(
        "an agent waits for what an import has forked", "agent.py",
        "os.set_blocking(process.stdout.fileno(), False)", "pass",
        "keeps_nobody_waiting", "cluster/test_preload", "cluster",
    ),
    Mutation(
        "a process with threads is forked", "preload.py",
        "threads > 1 or", "",
        "after_a_thread", "cluster/test_preload", "cluster",
    ),
    Mutation(
        "what is gone here stays on other hosts", "sync.py",
        '"--delete", ', "", "stale", "cluster/test_sync", "cluster",
    ),
    Mutation(
        "secrets are copied", "sync.py",
        '"--exclude-from=.syncignore"', "", "stale", "cluster/test_sync", "cluster",
    ),
    Mutation(
        "old code is good code", "findings.py",
        "    if stale:\n        summary", "    if False:\n        summary",
        "code_and_packages", "cluster/test_doctor", "cluster",
    ),
    Mutation(
        "a stop writes nothing", "stopping.py",
        "trainer.save_checkpoint(self.checkpoint)", "pass",
        "stop_leaves", "cluster/test_detached", "runs",
    ),
    Mutation(
        "each rank tells the error of all", "refusal.py",
        "time.sleep(TELL_SECONDS)", "pass",
        "all_ranks_is_told_once", "test_template", "runs",
    ),
    Mutation(
        "ranks time other steps", "anatomy.py",
        "random.Random(0)", "random.Random()",
        "same_part", "test_anatomy", "runs",
    ),
    Mutation(
        "all of short steps are timed", "anatomy.py",
        "self._drawn = mean / self.every_seconds", "pass",
        "same_part", "test_anatomy", "runs",
    ),
    Mutation(
        "hooks of steps that are not timed are called", "anatomy.py",
        "                self.__dict__[hook] = None\n", "                pass\n",
        "same_part", "test_anatomy", "runs",
    ),
    Mutation(
        "the end of each step is asked for", "anatomy.py",
        "HOOKS if self.batches is None else HOOKS[:-1]", "HOOKS[:-1]",
        "same_part", "test_anatomy", "runs",
    ),
    Mutation(
        "optimizers call in steps that are not timed", "anatomy.py",
        "                hook.remove()\n", "                pass\n",
        "same_part", "test_anatomy", "runs",
    ),
    Mutation(
        "waiting for data is not told once fewer steps are timed", "anatomy.py",
        "self._on_fetch if self._timing else self._before_fetch", "self._before_fetch",
        "same_part", "test_anatomy", "runs",
    ),
    Mutation(
        "hooks stay out in steps that are timed", "anatomy.py",
        "                self.__dict__.pop(hook, None)  #", "                pass  #",
        "same_part", "test_anatomy", "runs",
    ),
    Mutation(
        "a hook of another callback's class is left out", "hooks.py",
        "if inherited is getattr(pl.Callback, name):", "if name not in vars(type(callback)):",
        "hooks_with_code", "runs/test_hooks", "runs",
    ),
    Mutation(
        "a rank that waits for a core is said to compute", "anatomy.py",
        "        self.waited += waited\n", "", "take_a_core", "test_anatomy", "runs",
    ),
    Mutation(
        "a stop in the last evaluation is passed over", "stopping.py",
        "self._stop_if_asked(trainer, 0)", "pass",
        "last_evaluation", "runs/test_stopping", "runs",
    ),
    Mutation(
        "a stop comes before a validation that a resume passes over", "stopping.py",
        "within |= loop.epoch_loop._should_check_val_fx(loop._data_fetcher)", "pass",
        "validation_within", "runs/test_stopping", "runs",
    ),
    Mutation(
        "what is left of an epoch in which a run ended is left out", "resuming.py",
        "        if cut_short:", "        if False:",
        "goes_on_within_it", "runs/test_resuming", "runs",
    ),
    Mutation(
        "an epoch that is resumed within accumulates nothing", "resuming.py",
        "callback.on_train_epoch_start(trainer, pl_module)", "pass",
        "accumulates_as_before", "runs/test_resuming", "runs",
    ),
    Mutation(
        "data without a test are found out after training", "beforehand.py",
        "if test and trainer.limit_test_batches and", "if False and",
        "without_a_loader", "runs/test_beforehand", "runs",
    ),
    Mutation(
        "a file keeps the worst by a metric of its own", "config.py",
        "if alone and (\"mode\" in inherited or not where):", "if False:",
        "say_what_is_better", "test_config", "runs",
    ),
    Mutation(
        "an experiment that config.yaml names keeps the worst", "config.py",
        'for group in ("callbacks", *recipes.RECIPES):', 'for group in ("callbacks",):',
        "config_yaml_names", "test_config", "runs",
    ),
    Mutation(
        "settings of a logger that nobody chose are passed over", "config.py",
        "if typed and not chosen:", "if False:",
        "refused_in_a_line and wandb", "test_config", "runs",
    ),
    Mutation(
        "what was best before a resume is forgotten", "resuming.py",
        'state["dirpath"] = self.dirpath', "pass", "best_of_before", "runs/test_resuming", "runs",
    ),
    Mutation(
        "a search takes a checkpoint's place", "resuming.py",
        'if stage == "fit" and searches:', "if False:",
        "searches_no_learning", "runs/test_resuming", "runs",
    ),
    Mutation(
        "a checkpoint of a step is written before its validation", "resuming.py",
        "        if not self._put_off:", "        if True:",
        "knows_the_validation", "runs/test_resuming", "runs",
    ),
    Mutation(
        "averaged weights are not those that are tested", "resuming.py",
        '"current_model_state" in checkpoint and', "False and", "averaged_weights",
        "runs/test_monitoring",
        "runs",
    ),
    Mutation(
        "Ctrl-C without a launcher is Python's", "stopping.py",
        "alone = launched_size() is None", "alone = False",
        "ctrl_c_without", "test_template", "runs",
    ),
    Mutation(
        "make takes variables that its target does not use", "variables.py",
        "if name in TAKEN - taken and goals:", "if False:", "says_what_it_lacks", "test_make",
        "cluster",
    ),
    Mutation(
        "a sparse gradient that was cleared counts", "buckets.py",
        "return bool(gradient.any())  #", "return gradient.is_sparse or bool(gradient.any())  #",
        "may_be_cleared", "test_strategy",
    ),
    Mutation(
        "under DDP each rank reads checkpoints", "ddp.py",
        "return self.broadcast(checkpoint) if self.world_size > 1 else checkpoint",
        "return super().load_checkpoint(checkpoint_path, weights_only)",
        "across_hosts_under_ddp", "cluster/test_testbed",
    ),
    Mutation(
        "the batch that a step got is any step's first argument", "mistakes.py",
        'isinstance(given.get("self"), Strategy) and ', "", "batch_that", "runs/test_mistakes",
        "runs",
    ),
    Mutation(
        "steps that Lightning does not count are not told", "hints.py",
        "trainer.global_step > first or not keeps", "True",
        "does_not_count", "runs/test_report", "runs",
    ),
    Mutation(
        "the step of a run is its median", "report.py",
        'mean = anatomy["step_ms"]["mean"]', 'mean = anatomy["step_ms"]["median"]',
        "mean_is_told", "runs/test_report", "runs",
    ),
    Mutation(
        "traces are fetched with what a login shell prints", "profiling.py",
        r'.partition(b"\n{}\n")[2]', "", "below_what", "cluster/test_logins", "benchmarks",
    ),
    Mutation(
        "steps that send nothing are set against processes that are alone", "efficiency.py",
        'ms = "step_ms" if', 'ms = "median_ms" if', "counts_where", "test_efficiency",
        "benchmarks",
    ),
    Mutation(
        "a batch that a worker cannot hand over is waited for", "run.py",
        "        Queue._on_queue_feeder_error = in_place_of_a_batch", "        ()",
        "hand_over", "runs/test_mistakes", "runs",
    ),
    Mutation(
        "weights of a damaged checkpoint are trained on", "checkpoints.py",
        "(part := archive.testzip())", '(part := "")', "damaged", "runs/test_checkpoints", "runs",
    ),
    Mutation(
        "a full /dev/shm is told as a full disk", "mistakes.py",
        "filename.endswith(SEMAPHORE)", "filename == SEMAPHORE", "semaphore",
        "runs/test_mistakes", "runs",
    ),
]  # fmt: skip


def _unneeded(folder: str, names: list[str]) -> list[str]:
    top = {".git", ".venv", "logs", "data", ".hypothesis"} if Path(folder) == ROOT else set()
    return [n for n in names if n in top or n == "__pycache__" or n.endswith("_cache")]


def survives(mutation: Mutation) -> str | None:
    """What speaks against the tests; None if they fail, as they should."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=_unneeded)
        file = copy / mutation.folder / mutation.file
        text = file.read_text()
        if text.count(mutation.old) != 1:
            return f"{file.name} has {text.count(mutation.old)} times:\n{mutation.old}"
        file.write_text(text.replace(mutation.old, mutation.new))
        # A hang is a failure too, and one that takes a minute is enough.
        pytest = [
            sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", "--timeout=100",
            "-p", "no:cacheprovider",
        ]  # fmt: skip
        tests = [f"tests/{mutation.module}.py", "-k", mutation.tests]
        done = subprocess.run([*pytest, *tests], cwd=copy, capture_output=True, text=True)
    if done.returncode != 1 or "FAILED tests/" not in done.stdout:
        return f"pytest ends with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-500:]}"
    return None


def main(name: str = "") -> int:
    chosen = [mutation for mutation in MUTATIONS if name in mutation.name]
    survivors = 0
    for index, mutation in enumerate(chosen, start=1):
        problem = survives(mutation)
        survivors += problem is not None
        outcome = f"SURVIVES: {problem}" if problem else "found"
        print(f"[{index}/{len(chosen)}] {mutation.name}: {outcome}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations found by the tests")
    return int(bool(survivors or not chosen))


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
