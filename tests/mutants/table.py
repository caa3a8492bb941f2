"""The mutants: every bug, where it is planted, and who must notice it."""

from __future__ import annotations

from tests.mutants.planting import Mutant

COVERING = "tests/equivalence/test_equivalence.py -k test_covering"

PROGRAMS = [
    Mutant(
        "dropped-send", "the first value that a stage makes is not sent on",
        "program.lower:add_messages",
        "[a for c in sends for a in travel(ActionKind.SEND, c, c.consumers, False)]",
        "[a for c in sends[1:] for a in travel(ActionKind.SEND, c, c.consumers, False)]",
        "tests/program/test_lower.py", gpt="pipeline=2,microbatches=2", network="pipeline=2,microbatches=2",
        error="sends meet",
    ),
    Mutant(
        "gradient-not-sent-back", "a stage does not send the gradient of what it received, and nobody waits for it",
        "program.lower:add_messages",
        "if action.kind is ActionKind.FORWARD:\n"
        "    arrivals = [a for c in receives for a in travel(ActionKind.RECEIVE, c, [c.producer], False)]\n"
        "    departures = [a for c in sends for a in travel(ActionKind.SEND, c, c.consumers, False)]\n"
        "else:\n"
        "    arrivals = [a for c in sends if c.requires_grad "
        "for a in travel(ActionKind.RECEIVE, c, c.consumers, True)]\n"
        "    departures = [a for c in receives if c.requires_grad "
        "for a in travel(ActionKind.SEND, c, [c.producer], True)]",
        "if action.kind is ActionKind.FORWARD:\n"
        "    arrivals = [a for c in receives for a in travel(ActionKind.RECEIVE, c, [c.producer], False)]\n"
        "    departures = [a for c in sends for a in travel(ActionKind.SEND, c, c.consumers, False)]\n"
        "else:\n"
        "    arrivals = []\n"
        "    departures = []",
        "tests/program/test_lower.py", gpt="pipeline=2,microbatches=2", network="pipeline=2,microbatches=2",
    ),
    Mutant(
        "tied-weight-of-one-stage", "gradients of a weight that two stages hold are not summed",
        "program.lower:_reduction_groups",
        "rank_groups = [tuple(sorted(ranks)) for ranks in groups.values()]",
        "rank_groups = [(rank,) for ranks in groups.values() for rank in ranks]",
        "tests/program/test_lower.py", gpt="pipeline=2,microbatches=2",
    ),
    Mutant(
        "deadlock-check-passes", "programs in which workers wait for each other in a circle pass the check",
        "program.check:check", "not nx.is_directed_acyclic_graph(waits)", "False",
        "tests/program/test_lower.py", unseen="what is checked is right",
    ),
    Mutant(
        "unmatched-message-passes", "a value that meets the receive of another one passes the check",
        "program.check:match_messages",
        "(sent.value, sent.microbatch, sent.gradient) != (received.value, received.microbatch, received.gradient)",
        "sent.microbatch != received.microbatch",
        "tests/program/test_lower.py", unseen="what is checked is right",
    ),
    Mutant(
        "relay-cut-off-by-one", "a box that is cut along a dimension loses its last position",
        "program.boxes:_to_global",
        "positions",
        "[(first, last - 1) for first, last in positions]",
        "tests/program/test_boxes.py", gpt="[tensor=2|1],microbatches=2", network="[tensor=2|1],microbatches=2",
        error="nobody has",
    ),
]  # fmt: skip

PASSES = [
    Mutant(
        "gradient-scaled-by-replicas", "every replica divides its gradients by their number once more",
        "runtime.pipeline.executor:Executor._backward",
        "part.weight * (part.samples if mean else 1) / state.samples_in_mean",
        "part.weight * (part.samples if mean else 1) / state.samples_in_mean / len(self.program.replicas)",
        COVERING, gpt="data=2", network="data=2",
    ),
    Mutant(
        "microbatches-weighted-alike", "a microbatch counts as much as any other, however many samples it has",
        "runtime.pipeline.executor:Executor._backward",
        "part.weight * (part.samples if mean else 1) / state.samples_in_mean",
        "part.weight / len(state.sample_slices)",
        COVERING, gpt="pipeline=2,microbatches=3", network="pipeline=2,microbatches=3",
    ),
    Mutant(
        "samples-counted-off-by-one", "the mean is over one sample less than there are",
        "runtime.pipeline.executor:Executor._begin",
        "sum(share.samples for share in shares.values()) if self.is_replica_local else batch.samples",
        "batch.samples - 1",
        COVERING, gpt="data=2", network="data=2",
    ),
    Mutant(
        "stand-in-counts", "a replica without a sample of a short microbatch counts the one that it borrows",
        "compile.sample_shares:compute_shares",
        "int(not empty)",
        "1",
        "tests/compile/test_sample_shares.py", gpt="data=2,microbatches=4", network="data=2,microbatches=4",
    ),
    Mutant(
        "borrowed-sample", "replicas but the first take the sample before their own as well, and leave out their last",
        "compile.sample_shares:Batch.leaves_of",
        "share.start",
        "max(share.start - 1, 0)",
        "tests/compile/test_sample_shares.py", gpt="data=2", network="data=2",
    ),
    Mutant(
        "loss-of-unequal-parts", "the printed loss is the mean of the microbatches' means",
        "runtime.pipeline.executor:Executor._forward",
        "mean = parts == 1\n"
        "state.loss_totals.append(total * part.samples if mean else total)\n"
        "state.loss_counts.append(part.samples if mean else live.loss[1].detach())",
        "state.loss_totals.append(total)\n"
        "state.loss_counts.append(1)",
        COVERING, gpt="pipeline=2,microbatches=3", network="pipeline=2,microbatches=3",
    ),
    Mutant(
        "incoming-gradient-lost", "a stage hands back zeros in place of the gradient of what it received",
        "runtime.pipeline.stage_runner:StageRunner._propagate",
        "torch.zeros_like(x) if x.grad is None else x.grad",
        "torch.zeros_like(x)",
        "tests/runtime/pipeline/test_stage_runner.py",
        gpt="pipeline=2,microbatches=2", network="pipeline=2,microbatches=2",
    ),
    Mutant(
        "gradients-of-the-last-step", "gradients are not forgotten after a step",
        "runtime.sync.objective_update:ObjectiveUpdate.zero_grad",
        "parameter.grad = None",
        "pass",
        COVERING, gpt="data=2", network="data=2",
    ),
]  # fmt: skip

REDUCTION = [
    Mutant(
        "bucket-before-its-gradients", "a bucket leaves with the first gradient of a backward pass",
        "runtime.sync.bucket_launcher:BucketLauncher._on_gradient",
        "self._next < len(self._buckets) and not self._missing[self._next] and self._early[self._next]",
        "self._next < len(self._buckets) and self._early[self._next]",
        COVERING, gpt="data=2", network="data=2 optimizer=adamw",
    ),
    Mutant(
        "tied-weight-twice", "the gradient of a weight that several stages hold counts twice",
        "runtime.sync.all_reduce:AllReducer.wait_bucket",
        "match_strides(gradient, parameter)",
        "match_strides(gradient * 2 if launch.bucket.name.startswith('tied') else gradient, parameter)",
        COVERING, gpt="pipeline=2,microbatches=2",
    ),
    Mutant(
        "clip-norm-misses-a-shard", "where replicas hold parts of gradients, the norm is that of one replica's parts",
        "runtime.sync.objective_update:_make_replica_sum",
        "range(plan.workers) if local_model.shard_units.units else replica_ranks(plan, local_model.world.rank)",
        "replica_ranks(plan, local_model.world.rank)",
        "tests/equivalence/test_sharded.py", gpt="data=2,shard=parameters clip=0.1",
        network="data=2,shard=parameters clip=0.1 optimizer=adamw",
    ),
    Mutant(
        "clip-norm-of-one-stage", "every stage of a pipeline clips by the norm of its own gradients",
        "runtime.parameters.optimizer:GradientClipper.clip_gradients",
        "sums.sum_replica(squares)",
        "squares",
        "tests/runtime/parameters/test_optimizer.py", gpt="pipeline=2,microbatches=2 clip=0.1",
        network="pipeline=2,microbatches=2 clip=0.1 optimizer=adamw",
    ),
    Mutant(
        "clip-norm-counts-tied-twice", "a weight that two stages hold counts twice in the norm",
        "runtime.sync.objective_update:_counted_names",
        "filter(local_model.shard_spec.speaks_for, names)",
        "filter(local_model.shard_spec.is_counted, names)",
        "tests/runtime/parameters/test_optimizer.py -k counts_once", gpt="pipeline=2,microbatches=2 clip=0.1",
    ),
    Mutant(
        "zero-wrong-offset", "the pieces of ZeRO lie one element too early in their vector",
        "runtime.parameters.zero_shards:FlatBuffer.store_shard",
        "begin + piece.begin - shard_begin",
        "max(begin + piece.begin - shard_begin - 1, 0)",
        "tests/equivalence/test_sharded.py", gpt="data=2,shard=gradients",
        network="data=2,shard=gradients optimizer=adamw",
    ),
    Mutant(
        "zero-forgets-microbatches", "of several microbatches only the last one's gradients are kept",
        "runtime.sync.zero.reduce_scatter:ReduceScatterer._finish_reduce",
        "part if bucket_shard.shard_sum is None else bucket_shard.shard_sum.add_(part)",
        "part",
        "tests/equivalence/test_sharded.py", gpt="data=2,microbatches=2,shard=gradients",
        network="data=2,microbatches=2,shard=gradients optimizer=adamw",
    ),
]  # fmt: skip

STATISTICS = [
    Mutant(
        "statistics-of-one-replica", "batch normalization sees the samples of one replica only",
        "graph.operators.sync_batch_norm:SyncStatistics.forward",
        "part.sum_replicas(sums)",
        "None",
        "tests/runtime/test_job.py tests/placement/rules/test_normalization_rules.py", network="data=2 optimizer=adamw",
    ),
    Mutant(
        "statistics-backward-of-one-replica", "the gradient of batch statistics is that of one replica's samples",
        "graph.operators.sync_batch_norm:SyncStatistics.backward",
        "part.sum_replicas(sums)",
        "None",
        "tests/placement/rules/test_normalization_rules.py", network="data=2 optimizer=adamw",
    ),
    Mutant(
        "running-statistics-twice", "running means move twice in a step",
        "graph.operators.sync_batch_norm:batch_norm",
        "move_statistics(running_mean, mean, momentum)",
        "[move_statistics(running_mean, mean, momentum) for _ in '12']",
        "tests/placement/rules/test_normalization_rules.py", network="data=2 optimizer=adamw",
    ),
    Mutant(
        "recomputed-statistics-once", "running statistics under the user's checkpoints move once in a step",
        "graph.capture.recomputed_norms:repeat_moves",
        "times[str(node.args[_MEAN].meta['role'][1])]", "1",
        "tests/graph/capture/test_recomputed_norms.py", unseen="the self-check of capture notices, and makes a leaf",
    ),
    Mutant(
        "running-variance-biased", "running variances are those of the samples, not the unbiased ones",
        "graph.operators.sync_batch_norm:batch_norm",
        "variance * (count / (count - 1))",
        "variance",
        "tests/placement/rules/test_normalization_rules.py", network="data=2 optimizer=adamw",
    ),
    Mutant(
        "mask-of-another-sample", "every replica draws the masks of the batch's first samples",
        "graph.operators.counter_rng:_count",
        "part.first * (count // part.samples) if batch_dim is not None and part.samples else 0",
        "0",
        "tests/graph/operators/test_counter_rng.py",
        gpt="data=2,microbatches=2", network="data=2,microbatches=2 optimizer=adamw",
        error="would not compute what one device",
    ),
    Mutant(
        "mask-without-batch-dimension", "random values are keyed as if they belonged to no sample",
        "graph.capture.assign_keys:_key_node",
        "None if ragged else batch_dimension(val)",
        "None",
        "tests/graph/operators/test_counter_rng.py",
        gpt="data=2,microbatches=2", network="data=2,microbatches=2 optimizer=adamw",
        error="would not compute what one device",
    ),
    Mutant(
        "mask-of-every-step", "the same mask is drawn in every step",
        "graph.operators.counter_rng:_derive_keys",
        "part.step * 0xD1B54A32D192ED03",
        "0",
        "tests/graph/operators/test_counter_rng.py", unseen="one worker draws by the same function",
    ),
]  # fmt: skip


SPLITS = [
    Mutant(
        "halo-one-row-short", "what a rank reads of its neighbours' positions lacks the last one",
        "placement.redistribute:overlapping_ranges",
        "min(b, stop)",
        "min(b, stop - (tuple(owned) != tuple(wanted_ranges)))",
        "tests/placement/rules/test_convolution_rules.py", network="sequence=2",
    ),
    Mutant(
        "halo-gradient-overwritten", "the gradient of what several ranks have is the last one's, not the sum",
        "placement.kernels.halo_exchange:_Halo.backward",
        "out.narrow(dim, at, part.shape[dim]).add_(part)",
        "out.narrow(dim, at, part.shape[dim]).copy_(part)",
        "tests/placement/rules/test_convolution_rules.py", network="sequence=2",
    ),
    Mutant(
        "bias-of-every-rank", "where products are summed over ranks, each of them adds the bias",
        "placement.rules.matmul:multilinear", "[added.index]", "[]",
        "tests/placement/rules/test_matmul_rules.py", gpt="tensor=2", network="tensor=2",
    ),
    Mutant(
        "convolution-bias-of-every-rank", "where channels are summed over ranks, each of them adds the bias",
        "placement.rules.convolution:_by_input_channels",
        "placed |= {bias.index: PARTIAL for bias in form.biases}", "pass",
        "tests/placement/rules/test_convolution_rules.py", network="tensor=2",
    ),
    Mutant(
        "groups-of-the-whole", "a rank with some groups of a convolution is told the number of all",
        "placement.rules.convolution:set_local_groups",
        "int(edit['groups']) * out.local_length(edit.index) // out.size",
        "int(edit['groups'])",
        "tests/placement/rules/test_convolution_rules.py", network="tensor=2", error="groups",
    ),
    Mutant(
        "fused-segments-swapped", "of a matrix with q, k and v side by side a rank has its parts in reverse order",
        "placement.redistribute:local_shard",
        "[x.narrow(shard.dim, start, stop - start) for start, stop in shard.ranges(index)]",
        "[x.narrow(shard.dim, start, stop - start) for start, stop in reversed(shard.ranges(index))]",
        "tests/placement/test_whole_graphs.py tests/placement/rules/test_shape_rules.py", gpt="tensor=2",
    ),
    Mutant(
        "part-of-another-rank", "of weights that are cut, the first rank holds the last one's part, and so on",
        "sharding.layout:local_part",
        "local_shard(tensor, placement, coordinates[axis])",
        "local_shard(tensor, placement, len(placement.cuts[0]) - 2 - coordinates[axis])",
        "tests/runtime/test_tensor_parallel_job.py", gpt="tensor=2", network="tensor=2", error="exceeds dimension size",
    ),
    Mutant(
        "all-reduce-of-own", "a sum over an axis is each rank's own summand twice",
        "runtime.tensor_parallel:TransportAxis.begin_all_reduce",
        "torch.add(*(part for part in swap() if part is not None))",
        "tensor + tensor + 0 * torch.add(*(part for part in swap() if part is not None))",
        "tests/runtime/test_tensor_parallel_job.py", gpt="tensor=2", network="tensor=2",
    ),
    Mutant(
        "all-to-all-permuted", "what ranks exchange is put together in the reverse order of the ranks",
        "placement.redistribute:_all_to_all",
        "assemble_shards(exchange(), source)",
        "assemble_shards(exchange()[::-1], source)",
        "tests/placement/test_redistribute.py",
        gpt="sequence=2 pins=blocks.0/scaled_dot_product_attention:sequence:shard(1)",
        network="sequence=2 pins=blocks.0.depthwise/conv2d:sequence:shard(1)",
    ),
    Mutant(
        "all-gather-permuted", "gathered parts are put together in the reverse order of the ranks",
        "placement.redistribute:_all_gather",
        "[part for part in parts if part is not None]",
        "[part for part in parts[::-1] if part is not None]",
        "tests/placement/test_redistribute.py", gpt="tensor=2", network="tensor=2",
    ),
    Mutant(
        "reduce-scatter-of-two", "of what is summed and scattered the last rank's summand is left out",
        "placement.redistribute:_reduce_scatter",
        "out = out + part",
        "out = out + part * (part is not parts[-1])",
        "tests/placement/test_redistribute.py", gpt="tensor=2", network="tensor=2",
    ),
    Mutant(
        "ring-in-the-wrong-order", "a step of the ring is taken for the block of the rank behind",
        "placement.kernels.ring_attention:_RingRank.add_blocks",
        "(me - step) % ring.degree",
        "(me + step) % ring.degree",
        "tests/placement/rules/test_attention_rules.py", gpt="sequence=3",
    ),
    Mutant(
        "ring-gradients-lost", "of the gradients of its keys a rank keeps only those that came last",
        "placement.kernels.ring_attention:_RingRank.add_gradients",
        "of_key + part.key, of_value + part.value",
        "part.key, part.value",
        "tests/placement/rules/test_attention_rules.py", gpt="sequence=2",
    ),
    Mutant(
        "ring-without-rescaling", "sums of earlier blocks keep referring to the earlier maximum",
        "placement.kernels.block_attention:OnlineSoftmax.add_block",
        "numerator.mul_(shrink).add_(weights.to(value.dtype) @ value[..., : tile.keys, :])",
        "numerator.add_(weights.to(value.dtype) @ value[..., : tile.keys, :])",
        "tests/placement/rules/test_attention_rules.py", gpt="sequence=2",
    ),
    Mutant(
        "causal-mask-shifted", "in a ring a query does not see its own position",
        "placement.kernels.block_attention:_scores",
        "positions[: tile.keys] > rows.unsqueeze(-1)",
        "positions[: tile.keys] >= rows.unsqueeze(-1)",
        "tests/placement/rules/test_attention_rules.py", gpt="sequence=2",
    ),
    Mutant(
        "causal-mask-of-a-part-shifted", "some of the queries see the position behind their own as well",
        "placement.kernels.causal_attention:_allowed_scores",
        "torch.arange(keys, device=rows.device) <= rows.unsqueeze(-1)",
        "torch.arange(keys, device=rows.device) <= rows.unsqueeze(-1) + 1",
        "tests/placement/rules/test_attention_rules.py",
        gpt="sequence=2 pins=blocks.0/scaled_dot_product_attention:sequence:shard(2);"
        "blocks.0/transpose#2:sequence:replicate;blocks.0/transpose#3:sequence:replicate",
    ),
    Mutant(
        "lookup-without-mask", "a rank gives its first row for a word whose row another rank has",
        "placement.rules.vocabulary:lookup",
        "rows.masked_fill_(~mask.unsqueeze(-1), 0)",
        "rows",
        "tests/placement/rules/test_embedding_rules.py", gpt="tensor=2 pins=tokens.weight:tensor:shard(0)",
    ),
    Mutant(
        "softmax-of-own-classes", "ranks do not add up their sums of exponentials",
        "placement.rules.vocabulary:_CrossEntropyTerms.forward",
        "all_reduce_sum(axes, torch.stack(sums))",
        "torch.stack(sums)",
        "tests/placement/rules/test_loss_rules.py", gpt="tensor=2 classes=8001",
    ),
    Mutant(
        "loss-of-own-count", "a mean over tokens that are cut is divided by a rank's own number of them",
        "placement.rules.vocabulary:ShardedClassLoss.__call__",
        "all_reduce_sum(counted, count.sum())",
        "count.sum()",
        "tests/placement/rules/test_loss_rules.py", gpt="sequence=2 loss=own_labels",
    ),
    Mutant(
        "statistics-of-own-positions", "batch statistics of positions that are cut are a rank's own",
        "placement.kernels.normalization:ShardedBatchNorm.__call__",
        "sums.copy_(all_reduce_sum(axes, sums.clone()))",
        "None",
        "tests/placement/rules/test_normalization_rules.py", network="sequence=2",
    ),
    Mutant(
        "mean-of-own-count", "a mean over positions that are cut is divided by a rank's own number of them",
        "placement.kernels.reduction:ShardedMean.__call__",
        "x.sum(dim, keepdim, dtype=accumulation_dtype(self.dtype)) / self.count",
        "x.mean(dim, keepdim, dtype=accumulation_dtype(self.dtype))",
        "tests/placement/rules/test_reduction_rules.py", network="sequence=2",
    ),
    Mutant(
        "layer-norm-of-own-features", "a layer norm over features that are cut has a rank's own mean",
        "placement.kernels.normalization:_Normalized.forward",
        "all_reduce_sum(axes, values.sum(dims, keepdim=True))",
        "values.sum(dims, keepdim=True) * 2",
        "tests/placement/rules/test_normalization_rules.py",
        gpt="tensor=2 pins=blocks.0.norm1/layer_norm:tensor:shard(2)",
    ),
    Mutant(
        "mask-of-another-region", "a part of a random value draws the numbers of the batch's first samples",
        "graph.operators.counter_mixer:_draw_region",
        "_offsets(ranges[:inner], strides[:inner], out.device) + offset",
        "_offsets(ranges[:inner], strides[:inner], out.device)",
        "tests/graph/operators/test_counter_rng.py tests/placement/rules/test_random_rules.py", gpt="data=2,sequence=2",
    ),
]  # fmt: skip

SHARDS = [
    Mutant(
        "stale-weights", "after a step replicas keep the old weights of the parts that others have updated",
        "runtime.sync.objective_update:ObjectiveUpdate.update_weights",
        "self.shards.gather_updated(self.full_parameters.keys())",
        "None",
        "tests/equivalence/test_sharded.py", gpt="data=2,shard=optimizer",
        network="data=2,shard=optimizer optimizer=adamw",
    ),
    Mutant(
        "shard-of-another-parameter", "all pieces of a unit take the gradient of its first one",
        "runtime.sync.zero.reduce_scatter:ReduceScatterer._install_gradients",
        "total[at : at + size]",
        "total[:size]",
        "tests/equivalence/test_sharded.py", gpt="data=2,shard=gradients",
        network="data=2,shard=gradients optimizer=adamw",
    ),
    Mutant(
        "shard-before-its-gradients", "a unit is scattered with the first gradient of a backward pass",
        "runtime.sync.bucket_launcher:BucketLauncher._on_gradient",
        "self._next < len(self._buckets) and not self._missing[self._next] and self._early[self._next]",
        "self._next < len(self._buckets) and self._early[self._next]",
        "tests/equivalence/test_sharded.py", gpt="data=2,shard=gradients",
        network="data=2,shard=gradients optimizer=adamw",
    ),
    Mutant(
        "saved-at-the-wrong-place", "what autograd keeps of gathered weights is looked up at the unit's beginning",
        "runtime.sync.zero.all_gather_passes:GatheredPasses.pack_saved",
        "(address - full_buffer.data_ptr()) // full_buffer.element_size()",
        "0",
        "tests/equivalence/test_sharded.py", gpt="data=2,shard=parameters",
        network="data=2,shard=parameters optimizer=adamw",
    ),
    Mutant(
        "gathered-at-the-beginning", "of gathered weights every rank has its own part at the beginning",
        "runtime.transport.shared_memory.transport:SharedMemoryTransport.all_gather",
        "result[places[self.rank]]",
        "result[: wire.numel()]",
        "tests/distributed/test_shared_memory.py tests/runtime/transport/shared_memory/test_shared_transport.py",
        gpt="data=2,shard=parameters", network="data=2,shard=parameters optimizer=adamw",
    ),
    Mutant(
        "last-summand-left-out", "a sum over more than two workers leaves out the last",
        "runtime.transport.shared_memory.reduce:sum_parts_in_place",
        "for part in later_parts:\n"
        "    own_part += part",
        "for part in later_parts[:1]:\n"
        "    own_part += part",
        "tests/runtime/transport/shared_memory/test_shared_transport.py tests/distributed/test_shared_memory.py",
        gpt="data=3", network="data=3 optimizer=adamw",
    ),
    Mutant(
        "scattered-summand-left-out", "a reduce-scatter over more than two workers leaves out one summand",
        "runtime.transport.shared_memory.reduce:sum_parts",
        "parts[2:]",
        "parts[3:]",
        "tests/runtime/transport/shared_memory/test_shared_transport.py tests/distributed/test_shared_memory.py",
        gpt="data=3,shard=gradients", network="data=3,shard=gradients optimizer=adamw",
    ),
    Mutant(
        "norms-of-own-parts", "an optimizer that looks at norms takes those of its own parts",
        "optim.trust:TrustRatioOptimizer._compute_norms",
        "self.sum_over_holders is not None",
        "False",
        "tests/optim/test_norms_of_parts.py", gpt="data=2,shard=gradients optimizer=lamb",
        network="data=2,shard=gradients optimizer=lamb",
    ),
    Mutant(
        "stale-optimizer-state", "what an optimizer kept for whole parameters is zeros for their pieces",
        "compile.optimizer_parts:replace_parameters",
        "piece.slice_of(value).clone() if isinstance(value, Tensor) and value.shape == parameter.shape else value",
        "torch.zeros_like(piece.parameter) if isinstance(value, Tensor) and value.shape == parameter.shape else value",
        "tests/runtime/sync/zero/test_shard_units.py tests/equivalence/test_sharded.py",
        gpt="data=2,shard=gradients optimizer=adagrad", network="data=2,shard=gradients optimizer=adagrad",
        error="looks at several parameters at once",
    ),
]  # fmt: skip

SERVERS = [
    Mutant(
        "server-keeps-one-gradient", "of the gradients of several workers a server keeps the last",
        "runtime.sync.parameter_server.server:GradientSum._add_to_sum",
        "self.gradients[name].add_(gradient) if name in self.gradients else gradient",
        "gradient",
        "tests/runtime/sync/parameter_server/test_synchronous_servers.py",
        gpt="data=2,servers=1", network="data=2,servers=1",
    ),
    Mutant(
        "server-without-clipping", "a server does not clip",
        "runtime.sync.parameter_server.weights:ObjectiveState.apply_gradients",
        "self.clipper is not None",
        "False",
        "tests/runtime/sync/parameter_server/test_synchronous_servers.py", gpt="data=2,servers=2 clip=0.1",
        network="data=2,servers=2 clip=0.1",
    ),
    Mutant(
        "stale-answer", "a server answers a step without the weights that are new",
        "runtime.sync.parameter_server.server:ParameterServer._apply_update",
        "objective_state.latest_version = self._version",
        "objective_state.latest_version = self._version - 1",
        "tests/runtime/sync/parameter_server/test_synchronous_servers.py",
        gpt="data=2,servers=1", network="data=2,servers=1",
    ),
    Mutant(
        "replicas-averaged-alike", "in the mean of replicas' weights each counts alike, however many samples it saw",
        "runtime.sync.replica_mean:average_over_replicas",
        "sample_counts[members.index(transport.rank)] / sum(sample_counts)",
        "1 / len(sample_counts)",
        "tests/runtime/sync/test_local_sgd.py", gpt="data=2,every=2", network="data=2,every=2",
    ),
    Mutant(
        "agreement-a-step-late", "replicas agree a step after they should",
        "runtime.sync.local_sgd:LocalSgd.after_step",
        "(objective_state.steps_taken - self._sync.warmup) % self._sync.every == 0",
        "(objective_state.steps_taken - self._sync.warmup) % self._sync.every == 1",
        "tests/runtime/sync/test_local_sgd.py", gpt="data=2,every=2 steps=3", network="data=2,every=2 steps=3",
    ),
    Mutant(
        "gradients-summed-apart", "replicas that take steps of their own sum gradients all the same",
        "program.lower:without_replica_sync",
        "plan.stage_and_replica(r)[1] == program.replica",
        "True",
        "tests/runtime/sync/test_local_sgd.py", gpt="data=2,every=2", network="data=2,every=2",
    ),
    Mutant(
        "apart-divided-by-all", "a replica that goes its own way takes its mean over the samples of all replicas",
        "runtime.pipeline.executor:Executor._begin",
        "sum(share.samples for share in shares.values()) if self.is_replica_local else batch.samples",
        "batch.samples",
        "tests/runtime/sync/test_local_sgd.py", gpt="data=2,servers=1,staleness=1", network="data=2,every=2",
    ),
    Mutant(
        "unsent-entries-forgotten", "what top-k does not send is not remembered",
        "runtime.sync.compression.top_k:take_largest",
        "owed[places] = (exact - values.to(exact.dtype)).nan_to_num_(0.0, 0.0, 0.0)",
        "owed.zero_()",
        "tests/runtime/sync/compression/test_compressors.py tests/runtime/sync/compression/test_compressor_state.py",
        unseen="a proof of gradients that lose digits is refused",
    ),
]  # fmt: skip

LOOPS = [
    Mutant(
        "loop-counts-replicas-alike", "in a user's own loop every replica counts alike, however many samples it has",
        "runtime.data_parallel:DataParallel.backward",
        "start * share",
        "start / self.world.size",
        "tests/distributed/test_replicas.py", unseen="a user's own loop is not what a proof runs",
    ),
    Mutant(
        "shares-lie-wrong", "a worker looks for its samples of later microbatches among those of the first",
        "compile.sample_shares:share_offsets",
        "at += share.samples",
        "pass",
        "tests/compile/test_sample_shares.py tests/runtime/data/test_loader.py",
        unseen="a proof has whole batches, not loaded shares",
    ),
    Mutant(
        "same-order-in-every-epoch", "samples come in the same order in every epoch",
        "runtime.data.sample_order:_mix",
        "seed * 1000003 + epoch",
        "seed * 1000003",
        "tests/runtime/data/test_loader.py", unseen="a proof has batches, no dataset",
    ),
    Mutant(
        "short-batch-dropped", "the last, shorter batch of an epoch is always left out",
        "runtime.data.loader:batch_sizes",
        "remainder and not drop_last",
        "False",
        "tests/runtime/data/test_loader.py", unseen="a proof has batches, no dataset",
    ),
    Mutant(
        "same-augmentation-for-all", "all samples of an epoch draw the same numbers",
        "runtime.data.seeded_draws:SeededDataset._load_seeded",
        "seed_generators(*self._key, index)",
        "seed_generators(*self._key)",
        "tests/runtime/data/test_loader.py", unseen="a proof has batches, no dataset",
    ),
]  # fmt: skip

PRICES = [
    Mutant(
        "price-without-latency", "a collective costs its bytes and no latency",
        "cost.network.alpha_beta:collective_seconds",
        "rates.latency + bytes_per_rank(collective, size, degree) / rates.bandwidth",
        "bytes_per_rank(collective, size, degree) / rates.bandwidth",
        "tests/sharding/test_communication.py", unseen="a price",
    ),
    Mutant(
        "message-without-latency", "a simulated message arrives when its last byte has left",
        "cost.simulator.longest_path:_mark_ready",
        "travel.end + travel.transfer.latency",
        "travel.end",
        "tests/cost/simulator/test_simulate.py", unseen="a prediction",
    ),
    Mutant(
        "hop-for-nothing", "a simulated value is at once on the next stage",
        "cost.simulator.schedule_tasks:_SchedulePasses.__init__",
        "TransferTime(latency=ticks)",
        "TransferTime()",
        "tests/cost/simulator/test_schedule_tasks.py", unseen="a prediction",
    ),
    Mutant(
        "shared-cores-for-nothing", "lanes that share the cores of a host do not slow each other down",
        "cost.simulator.contention:ContentionSimulator._share_cores",
        "min(1.0, self.levels[host]) * self.factors[host][len(computing)]",
        "1.0",
        "tests/cost/simulator/test_contention.py", unseen="a prediction",
    ),
    Mutant(
        "endless-gathers-hidden", "gathering parameters for longer than a pass takes is hidden all the same",
        "cost.shard_traffic:exposed_seconds",
        "max(EXPOSED * travel, travel - compute)",
        "EXPOSED * travel",
        "tests/cost/test_shard_traffic.py", unseen="a price",
    ),
    Mutant(
        "bytes-of-one-way", "a sum is said to send each byte once",
        "cost.network.sync_volume:all_reduce_bytes",
        "2 * nbytes * (ranks - 1) / ranks",
        "nbytes * (ranks - 1) / ranks",
        "tests/cost/network/test_sync_volume.py", unseen="a price",
    ),
    Mutant(
        "one-state-of-the-optimizer", "of what an optimizer keeps for a parameter the last tensor is not counted",
        "cost.memory.optimizer_state:OptimizerState.bytes",
        "self.states.get(name, ())",
        "self.states.get(name, ())[:-1]",
        "tests/cost/memory/test_peak.py", unseen="a price",
    ),
    Mutant(
        "one-microbatch-too-many", "1F1B starts a microbatch more ahead than a stage needs",
        "schedule.synchronous:one_forward_one_backward", "min(ahead - 1, microbatches)", "min(ahead, microbatches)",
        "tests/schedule/test_synchronous.py", unseen="the order of passes, and how much memory they take",
    ),
    Mutant(
        "last-backward-missing", "a stage leaves out the backward pass of its last microbatch",
        "schedule.synchronous:_alternate", "range(steady, microbatches)", "range(steady, microbatches - 1)",
        "tests/schedule/test_synchronous.py", gpt="pipeline=2,microbatches=3", network="pipeline=2,microbatches=3",
        error="meet",
    ),
    Mutant(
        "ranks-of-an-operator-apart", "ranks that split an operator are not laid next to each other",
        "plan.fit_to_graph:assign_ranks",
        "ranks[stage] += range(first_rank, first_rank + sizes[stage])",
        "ranks[stage] += reversed(range(first_rank, first_rank + sizes[stage]))",
        "tests/plan/test_plan.py tests/plan/test_spec.py tests/program/test_lower.py",
        unseen="where a part lives, not what it computes",
    ),
]  # fmt: skip

MORE = [
    Mutant(
        "tied-summand-of-every-rank", "of a tied weight that several ranks of a stage hold, each adds the gradient",
        "program.lower:build_buckets",
        "GradientBucket(name, ranks, names, silent, names[0] in sparse)",
        "GradientBucket(name, ranks, names, frozenset(), names[0] in sparse)",
        "tests/program/test_lower.py tests/equivalence/test_hybrids.py -k 'test_lower or gpt'",
        gpt="[data=2|sequence=2,tensor=2],microbatches=2",
    ),
    Mutant(
        "samples-of-the-first-replica", "a replica's part of a value is taken to begin with the first sample",
        "compile.reshard:Resharder._find_box",
        "dim is None or not start",
        "True",
        "tests/equivalence/test_hybrids.py tests/compile/test_resplit_batches.py",
        gpt="[data=2|1],microbatches=2", network="[data=2|1],microbatches=2", error="nobody has",
    ),
    Mutant(
        "stand-in-in-statistics", "a replica without samples of its own adds a borrowed one to batch statistics",
        "graph.operators.sync_batch_norm:SyncStatistics.forward",
        "part.weight",
        "True",
        COVERING, network="data=2,microbatches=4",
    ),
    Mutant(
        "stand-in-in-statistics-backward", "a replica without samples of its own gives its borrowed one a gradient",
        "graph.operators.sync_batch_norm:SyncStatistics.backward",
        "sums = own.to(torch.float64, copy=True)",
        "sums = own.to(torch.float64, copy=True) + (1 - part.weight)",
        COVERING, network="data=2,microbatches=4",
    ),
    Mutant(
        "hosts-apart", "sums over several hosts stay those of each host",
        "runtime.transport.hierarchical:HierarchicalTransport._sum_over_hosts",
        "part.numel()",
        "False",
        "tests/runtime/transport/test_hierarchical.py", unseen="a proof runs on one host",
    ),
    Mutant(
        "buffer-of-another-stage", "of running statistics that two losses use the old ones are handed on",
        "runtime.parameters.shared_buffers:SharedBuffers.receive_updates",
        "self.stage == min(current)",
        "self.stage != min(current)",
        "tests/runtime/parameters/test_shared_buffers.py",
        unseen="a proof is of one loss, whose buffers stay on their stage",
    ),
    Mutant(
        "loop-forgets-earlier-passes", "in a user's own loop only the last backward pass before a step counts",
        "runtime.data_parallel:DataParallel._sum_pass",
        "gradient if summed.earlier is None else _accumulate(summed.earlier, gradient)",
        "gradient",
        "tests/distributed/test_replicas.py", unseen="a user's own loop is not what a proof runs",
    ),
    Mutant(
        "weights-of-the-last-rank", "replicas of a user's own loop start from the last rank's weights",
        "runtime.parameters.broadcast:broadcast_weights",
        "transport.rank == 0",
        "transport.rank == transport.size - 1",
        "tests/distributed/test_replicas.py -k rank_0", unseen="the workers of a proof start from the same weights",
    ),
]  # fmt: skip

COUNTS = [
    Mutant(
        "counts-of-own-replica", "replicas do not tell each other what they have counted in a batch",
        "samples.batch_statistics:BatchStatistics.compute_statistics",
        "replicas is not None",
        "False",
        "tests/samples/test_counts.py", gpt="data=2", network="data=2",
    ),
    Mutant(
        "counts-of-own-microbatch", "a mean over counts is divided by what a microbatch counts",
        "graph.operators.whole_batch_counts:WholeBatchStatistic.__call__",
        "part.whole is None",
        "True",
        "tests/samples/test_counts.py", gpt="pipeline=2,microbatches=3", network="pipeline=2,microbatches=3",
    ),
    Mutant(
        "stand-in-in-counts", "a replica without samples of its own counts its borrowed one",
        "samples.batch_statistics:_combine_parts",
        "part.weight",
        "True",
        "tests/samples/test_counts.py", gpt="data=2,microbatches=4", network="data=2,microbatches=4",
    ),
    Mutant(
        "share-upside-down", "a sum over samples is multiplied by the batch's share of a part, not by its inverse",
        "graph.operators.whole_batch_counts:BatchShare.__call__",
        "part.count_loss_samples / part.samples",
        "part.samples / part.count_loss_samples",
        "tests/samples/test_counts.py", gpt="data=2 loss=total", network="pipeline=2,microbatches=3 loss=total",
    ),
    Mutant(
        "size-of-own-part", "a sum over samples is divided by the number of those in hand, not of the batch's",
        "graph.operators.whole_batch_counts:WholeSize.__call__",
        "part.count_loss_samples",
        "part.samples",
        "tests/samples/test_counts.py", gpt="data=2 loss=per_sample", network="data=2 loss=per_sample",
    ),
    Mutant(
        "total-taken-for-a-mean", "a sum over samples is taken for a mean over them",
        "samples.derivation:_build_derivation",
        "power != expected_power",
        "False", "tests/samples/test_counts.py",
        gpt="data=2 loss=total", network="data=2 loss=total", times=2,
    ),
    Mutant(
        "function-proven-by-its-forward", "a custom function is proven by its forward pass, whatever the backward does",
        "samples.autograd.autograd_functions:_gradients_match",
        "not _is_gradient_of(trace.function.arguments[argument].state, walk, walk.key_of(result))",
        "False",
        "tests/samples/autograd/test_autograd_functions.py",
        unseen="the models of the proofs have no functions of their own",
    ),
    Mutant(
        "witness-never-compares", "what users say of their own Python is watched, and never found wrong",
        "runtime.pipeline.sample_witness:check_calls",
        "_Comparison(nodes[name], group, gather, mean).find_difference()",
        '""',
        "tests/equivalence/test_per_sample.py", unseen="what is watched is right in a proof",
    ),
    Mutant(
        "nan-unseen", "a loss that is no number is not seen",
        "runtime.pipeline.anomalies:AnomalyDetector.check_forward",
        "any(_has_non_finite(value) for value in live.loss[:1])",
        "False",
        "tests/commands/test_run_folder.py -k no_number", unseen="a proof has finite numbers",
    ),
    Mutant(
        "float16-without-scale", "gradients travel in float16 as large as they are",
        "runtime.sync.compression.half_precision:_scaling_power",
        "(15 - exponent).clamp(-limit, limit)",
        "0 * exponent",
        "tests/runtime/sync/compression/test_compressors.py", unseen="a proof of gradients that lose digits is refused",
    ),
    Mutant(
        "overflow-of-one-worker", "a worker leaves out an update where its own gradients overflow, and others do not",
        "runtime.sync.loss_scale:LossScale.find_overflow",
        "self._sum_workers(overflow.view(1))",
        "overflow.view(1)",
        "tests/equivalence/test_float16.py -k one_worker_has", unseen="a proof has finite numbers",
    ),
    Mutant(
        "gradients-stay-scaled", "gradients are clipped, and updates made, with those of the scaled loss",
        "runtime.sync.objective_update:ObjectiveUpdate.unscale_gradients",
        "self.loss_scale is not None",
        "False",
        "tests/equivalence/test_float16.py -k clipping", unseen="no plan of the proofs says precision=float16",
    ),
    Mutant(
        "second-tensor-misplaced", "of several tensors in a message the later ones are read at the wrong place",
        "runtime.plain_data.serialization:_Reader.read_tensor",
        "self._position += size + -size % _ALIGN",
        "self._position += size",
        "tests/runtime/plain_data/test_serialization.py",
        unseen="what workers tell each other beside what they compute",
    ),
]  # fmt: skip

SCHEDULED = [
    Mutant(
        "receives-in-program-order", "a worker with several stages receives messages in the order of its needs",
        "program.lower:lower", "order_receives(programs)", "programs",
        "tests/properties/test_program_laws.py", unseen="the deadlock check refuses it",
    ),
    Mutant(
        "weight-half-skipped", "the second half of a backward pass is left out",
        "runtime.pipeline.executor:Executor._backward",
        "runner.backward_weight(state.first_pass + i)", "None",
        "tests/equivalence/test_equivalence.py -k zb", gpt="pipeline=2,schedule=zb-h1,microbatches=2",
        network="pipeline=2,schedule=zb-v,microbatches=2",
    ),
    Mutant(
        "product-added-without-bias", "where a product adds to a gradient at once, the bias gets none",
        "runtime.pipeline.weight_gradients:DeferredGradients.accumulate",
        "[] if of_bias is None else [of_bias]", "[]",
        "tests/runtime/pipeline/test_weight_gradients.py", gpt="pipeline=2,schedule=zb-h1,microbatches=3",
        error="pop from empty list",
    ),
    Mutant(
        "newest-weights-for-all", "a batch in an asynchronous pipeline computes on the newest weights of its stage",
        "runtime.parameters.weight_versions:WeightVersions.begin",
        "max(self._restarted_at, batch - self._delay)", "self.newest",
        "tests/runtime/parameters/test_weight_versions.py", network="pipeline=2,schedule=pipedream-2bw,microbatches=2",
    ),
    Mutant(
        "stashed-weights-overwritten", "an update overwrites the weights that batches under way compute on",
        "runtime.parameters.weight_versions:WeightVersions.begin_update",
        "self._is_needed(self.newest, besides=min(self._used))", "False",
        "tests/runtime/parameters/test_weight_versions.py", network="pipeline=2,schedule=pipedream",
    ),
    Mutant(
        "delay-off-by-one", "weights of an asynchronous pipeline are taken to lack one update less",
        "schedule.asynchronous:weight_delays",
        "-(-(ahead - 1) // microbatches)", "-(-(ahead - 1) // microbatches) - (ahead > 2)",
        "tests/schedule/test_asynchronous.py", unseen="the rule is right on both sides of the proof",
    ),
    Mutant(
        "turns-start-too-few", "replicas in turn start a microbatch too few where those ahead are no multiple of them",
        "schedule.schedules",
        "min(-(-ahead // replicas) - 1, microbatches)", "min(ahead // replicas - 1, microbatches)",
        "tests/schedule/test_round_robin.py", unseen="the order of passes, and how much memory they take",
    ),
    Mutant(
        "statistics-of-own-turns", "running statistics move for the microbatches of a replica's own turns alone",
        "runtime.pipeline.running_statistics:RunningStatistics.move",
        "sum_replicas(rows.flatten()).view_as(rows)", "rows",
        "tests/equivalence/test_turns.py", network="data=2,replicas=round-robin,microbatches=4",
    ),
    Mutant(
        "turns-rated-as-parts", "a replica in turn is rated with the microbatches that all of its stage hold",
        "planner.stage_meshes:StageMeshSearch.count_live",
        "min(-(-self.microbatches // option.turns), -(-ahead // option.turns))", "min(self.microbatches, ahead)",
        "tests/planner/test_chosen_turns.py", unseen="what a search takes for possible",
    ),
    Mutant(
        "order-beyond-memory", "an order of passes is found that does not fit into the memory",
        "planner.find_order:find_order", "over[0] <= 0", "True",
        "tests/planner/test_find_order.py", unseen="the order of passes, and how much memory they take",
    ),
    Mutant(
        "first-order-found", "of the orders that fit the first one is taken, not the fastest",
        "planner.find_order:find_order", "prediction.seconds < best[0]", "False",
        "tests/planner/test_find_order.py", unseen="the order of passes, and how much time they take",
    ),
]  # fmt: skip

MUTANTS = [
    *COUNTS,
    *PROGRAMS,
    *PASSES,
    *SCHEDULED,
    *REDUCTION,
    *STATISTICS,
    *SPLITS,
    *SHARDS,
    *SERVERS,
    *LOOPS,
    *PRICES,
    *MORE,
]
