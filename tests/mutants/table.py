"""The mutants: every bug, where it is planted, and who must notice it."""

from __future__ import annotations

from mutants.planting import Mutant

COVERING = "tests/equivalence/test_equivalence.py -k test_covering"

PROGRAMS = [
    Mutant(
        "dropped-send", "the first value that a stage makes is not sent on",
        "program.lower:with_communication",
        "[a for c in sends for a in travel(Kind.SEND, c, c.consumers, False)]",
        "[a for c in sends[1:] for a in travel(Kind.SEND, c, c.consumers, False)]",
        "tests/program/test_lower.py", gpt="pipeline=2,microbatches=2", network="pipeline=2,microbatches=2",
    ),
    Mutant(
        "gradient-not-sent-back", "a stage does not send the gradient of what it received, and nobody waits for it",
        "program.lower:with_communication",
        "if action.kind is Kind.FORWARD:\n"
        "    before = [a for c in receives for a in travel(Kind.RECEIVE, c, [c.producer], False)]\n"
        "    after = [a for c in sends for a in travel(Kind.SEND, c, c.consumers, False)]\n"
        "else:\n"
        "    before = [a for c in sends if c.requires_grad for a in travel(Kind.RECEIVE, c, c.consumers, True)]\n"
        "    after = [a for c in receives if c.requires_grad for a in travel(Kind.SEND, c, [c.producer], True)]",
        "if action.kind is Kind.FORWARD:\n"
        "    before = [a for c in receives for a in travel(Kind.RECEIVE, c, [c.producer], False)]\n"
        "    after = [a for c in sends for a in travel(Kind.SEND, c, c.consumers, False)]\n"
        "else:\n"
        "    before = []\n"
        "    after = []",
        "tests/program/test_lower.py", gpt="pipeline=2,microbatches=2", network="pipeline=2,microbatches=2",
    ),
    Mutant(
        "tied-weight-of-one-stage", "gradients of a weight that two stages hold are not summed",
        "program.lower:_summing", "found = [tuple(sorted(ranks)) for ranks in groups.values()]",
        "found = [(rank,) for ranks in groups.values() for rank in ranks]",
        "tests/program/test_lower.py", gpt="pipeline=2,microbatches=2",
    ),
    Mutant(
        "deadlock-check-passes", "programs in which workers wait for each other in a circle pass the check",
        "program.check:check", "not nx.is_directed_acyclic_graph(waits)", "False",
        "tests/program/test_lower.py", unseen="what is checked is right",
    ),
    Mutant(
        "unmatched-message-passes", "a value that meets the receive of another one passes the check",
        "program.check:matched",
        "(sent.value, sent.microbatch, sent.gradient) != (received.value, received.microbatch, received.gradient)",
        "sent.microbatch != received.microbatch",
        "tests/program/test_lower.py", unseen="what is checked is right",
    ),
    Mutant(
        "relay-cut-off-by-one", "a box that is cut along a dimension loses its last position",
        "program.relay:_outside", "min(last, at + stop - start)", "min(last, at + stop - start) - 1",
        "tests/program/test_relay.py", gpt="[data=2 | 1],microbatches=2", network="[data=2 | 1],microbatches=2",
    ),
]  # fmt: skip

PASSES = [
    Mutant(
        "gradient-scaled-by-replicas", "every replica divides its gradients by their number once more",
        "runtime.worker:Worker._backward", "part.weight * (part.samples if mean else 1) / state.counted",
        "part.weight * (part.samples if mean else 1) / state.counted / len(self.program.replicas)",
        COVERING, gpt="data=2", network="data=2",
    ),
    Mutant(
        "microbatches-weighted-alike", "a microbatch counts as much as any other, however many samples it has",
        "runtime.worker:Worker._backward", "part.weight * (part.samples if mean else 1) / state.counted",
        "part.weight / len(state.parts)",
        COVERING, gpt="pipeline=2,microbatches=3", network="pipeline=2,microbatches=3",
    ),
    Mutant(
        "samples-counted-off-by-one", "the mean is over one sample less than there are",
        "runtime.worker:Worker.run", "sum(s.samples for s in own.values()) if self.alone else batch.samples",
        "batch.samples - 1",
        COVERING, gpt="data=2", network="data=2",
    ),
    Mutant(
        "stand-in-counts", "a replica without a sample of a short microbatch counts the one that it borrows",
        "runtime.division:shares", "int(not empty)", "1",
        "tests/runtime/test_division.py", gpt="data=2,microbatches=4", network="data=2,microbatches=4",
    ),
    Mutant(
        "borrowed-sample", "replicas but the first take the sample before their own as well, and leave out their last",
        "runtime.division:Batch.of", "share.start", "max(share.start - 1, 0)",
        "tests/runtime/test_division.py", gpt="data=2", network="data=2",
    ),
    Mutant(
        "loss-of-unequal-parts", "the printed loss is the mean of the microbatches' means",
        "runtime.worker:Worker._forward",
        "mean = len(live.loss) == 1\n"
        "state.total.append(total * part.samples if mean else total)\n"
        "state.count.append(part.samples if mean else live.loss[1].detach())",
        "state.total.append(total)\nstate.count.append(1)",
        COVERING, gpt="pipeline=2,microbatches=3", network="pipeline=2,microbatches=3",
    ),
    Mutant(
        "incoming-gradient-lost", "a stage hands back zeros in place of the gradient of what it received",
        "runtime.stage:StageRunner.backward", "torch.zeros_like(x) if x.grad is None else x.grad", "torch.zeros_like(x)",
        "tests/runtime/test_stage.py", gpt="pipeline=2,microbatches=2", network="pipeline=2,microbatches=2",
    ),
    Mutant(
        "gradients-of-the-last-step", "gradients are not forgotten after a step",
        "runtime.trainer:Trainer.zero_grad", "parameter.grad = None", "pass",
        COVERING, gpt="data=2", network="data=2",
    ),
]  # fmt: skip

REDUCTION = [
    Mutant(
        "bucket-before-its-gradients", "a bucket leaves with the first gradient of a backward pass",
        "runtime.sync.all_reduce:Reducer._finisher",
        "self._next < len(self._buckets) and not self._waiting[self._next] and self._sure[self._next]",
        "self._next < len(self._buckets) and self._sure[self._next]",
        COVERING, gpt="data=2", network="data=2",
    ),
    Mutant(
        "tied-weight-twice", "the gradient of a weight that several stages hold counts twice",
        "runtime.sync.all_reduce:Reducer.wait", "laid_as(gradient, parameter)",
        "laid_as(gradient * 2 if left.bucket.name.startswith('tied') else gradient, parameter)",
        COVERING, gpt="pipeline=2,microbatches=2",
    ),
    Mutant(
        "clip-norm-misses-a-shard", "where replicas hold parts of gradients, the norm is that of one replica's parts",
        "runtime.trainer:_sum_replica",
        "range(plan.workers) if holding.layout.units else replica_of(plan, holding.world.rank)",
        "replica_of(plan, holding.world.rank)",
        "tests/equivalence/test_sharded.py", gpt="data=2,shard=parameters clip=0.1",
        network="data=2,shard=parameters clip=0.1",
    ),
    Mutant(
        "clip-norm-of-one-stage", "every stage of a pipeline clips by the norm of its own gradients",
        "runtime.optimizer:Clipper.clip", "self._sum_replica(squares)", "squares",
        "tests/runtime/test_optimizer.py", gpt="pipeline=2,microbatches=2 clip=0.1",
        network="pipeline=2,microbatches=2 clip=0.1",
    ),
    Mutant(
        "clip-norm-counts-tied-twice", "a weight that two stages hold counts twice in the norm",
        "runtime.trainer:_counted", "[n for n in held if holding.stage == min(holding.holders[n])]", "list(held)",
        "tests/runtime/test_optimizer.py", gpt="pipeline=2,microbatches=2 clip=0.1",
    ),
    Mutant(
        "zero-wrong-offset", "the pieces of ZeRO lie one element too early in their vector",
        "runtime.sync.sharded:Flat.keep", "begin + piece.begin - first", "max(begin + piece.begin - first - 1, 0)",
        "tests/equivalence/test_sharded.py", gpt="data=2,shard=gradients", network="data=2,shard=gradients",
    ),
    Mutant(
        "zero-forgets-microbatches", "of several microbatches only the last one's gradients are kept",
        "runtime.sync.sharded_reduce:ShardedReducer._take",
        "part if each.total is None else each.total.add_(part)", "part",
        "tests/equivalence/test_sharded.py", gpt="data=2,microbatches=2,shard=gradients",
        network="data=2,microbatches=2,shard=gradients",
    ),
]  # fmt: skip

STATISTICS = [
    Mutant(
        "statistics-of-one-replica", "batch normalization sees the samples of one replica only",
        "graph.statistics:SharedStatistics.forward", "part.sum_replicas(sums)", "None",
        "tests/runtime/test_job.py tests/placement/test_normalization_rules.py", network="data=2",
    ),
    Mutant(
        "statistics-backward-of-one-replica", "the gradient of batch statistics is that of one replica's samples",
        "graph.statistics:SharedStatistics.backward", "part.sum_replicas(sums)", "None",
        "tests/placement/test_normalization_rules.py", network="data=2",
    ),
    Mutant(
        "running-statistics-twice", "running means move twice in a step",
        "graph.statistics:batch_norm",
        "running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)",
        "[running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum) for _ in '12']",
        "tests/placement/test_normalization_rules.py", network="data=2",
    ),
    Mutant(
        "running-variance-biased", "running variances are those of the samples, not the unbiased ones",
        "graph.statistics:batch_norm", "variance * (total / (total - 1))", "variance",
        "tests/placement/test_normalization_rules.py", network="data=2",
    ),
    Mutant(
        "mask-of-another-sample", "every replica draws the masks of the batch's first samples",
        "graph.random:bits",
        "part.first * (count // part.samples) if batch_dim is not None and part.samples else 0", "0",
        "tests/graph/test_random.py", gpt="data=2", network="data=2",
    ),
    Mutant(
        "mask-without-batch-dimension", "random values are keyed as if they belonged to no sample",
        "graph.keying:_keyed", "None if ragged else batch_dimension(val)", "None",
        "tests/graph/test_random.py", gpt="data=2", network="data=2",
    ),
    Mutant(
        "mask-of-every-step", "the same mask is drawn in every step",
        "graph.random:_keys", "part.step * 0xD1B54A32D192ED03", "0",
        "tests/graph/test_random.py", unseen="one worker draws by the same function",
    ),
]  # fmt: skip

MUTANTS = [*PROGRAMS, *PASSES, *REDUCTION, *STATISTICS]
