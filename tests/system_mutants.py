"""Mistakes in published systems, for `mutants.py`: by the row of docs/systems.md.

Each is name to (files, change, tests), as `mutants.Mutant` has them. A mistake is one of
the formula or the order of the paper; the row names the tests that have to see it.
"""

# Rows whose code is torch's alone.
OF_TORCH = {
    "segments of sqrt(n) (Chen et al. 2016)": "torch's checkpoint_sequential",
    "OneFlow's split, broadcast, partial": "torch's redistribute",
}

BY_SYSTEM = {
    "mixture of experts (Shazeer et al. 2017)": {
        "the load loss of noisy top-k has the coefficient of the importance loss": (
            "moe_ext/nn/routers/noisy_topk.py",
            'losses["load"] = self.[-load_coef-]{+importance_coef+} *',
            "tests/nn/test_routers.py -k noisy_topk_losses",
        )
    },
    "GShard": {
        "GShard's preset serves tokens by position": (
            "moe_ext/nn/presets.py",
            'Capacity(1.0, groups=groups[-, drop="choice"-])',
            "tests/nn/test_presets.py",
        ),
        "GShard's router weighs a first choice alone where the second was dropped": (
            "moe_ext/nn/routers/gshard.py",
            "[-torch.where(dropped_T, others_TE.argmax(dim=1), second_T)-]{+second_T+}",
            "tests/nn/test_pinned_routing.py -k gshard",
        ),
    },
    "GShard's layer in einsums": {
        "a layer serves second choices before later tokens' first": (
            "moe_ext/nn/capacity.py",
            'policy = "position" if policy == "[-random" and not training-]{+choice"+} else policy',
            "tests/nn/test_gshard_einsum.py",
        ),
        "a capacity that is no whole number is rounded down": (
            "moe_ext/nn/capacity.py",
            "rows = [--(-group_tokens * top_k * numerator // (denominator * num_experts)-]"
            "{+group_tokens * top_k * numerator // (denominator * num_experts+})",
            "tests/nn/test_gshard_einsum.py",
        ),
    },
    "Switch": {
        "Switch has the capacity of training in evaluation": (
            "moe_ext/nn/presets.py",
            "Capacity(1.25[-, eval_factor=2.0-])",
            "tests/nn/test_presets.py",
        )
    },
    "DeepSpeed-MoE, PR-MoE": {
        "DeepSpeed's loss counts both choices": (
            "moe_ext/integrations/deepspeed.py",
            "[-(1 if self.k == 2 else self.k)-]{+self.k+}",
            "tests/integrations/test_deepspeed.py",
        ),
        "PR-MoE swaps the weights of its two branches": (
            "moe_ext/nn/residual.py",
            "y * weights[..., [-:1] + self.mlp(x) * weights[..., 1:-]"
            "{+1:] + self.mlp(x) * weights[..., :1+}]",
            "tests/nn/test_residual.py",
        ),
        "stage 2 of a DeepSpeed configuration gathers twice": (
            "moe_ext/integrations/deepspeed_config.py",
            '"reshard_after_forward": self.zero_stage [-== 3-]{+>= 2+}',
            "tests/integrations/test_deepspeed_config.py -k stage_3",
        ),
        "gradients of 16 bits are reduced in 16 bits": (
            "moe_ext/integrations/deepspeed_config.py",
            "reduced = self.communication_dtype or [-(low and torch.float32)-]{+low+}",
            "tests/integrations/test_deepspeed_config.py -k 16_bits",
        ),
    },
    "Paddle, Tutel, FastMoE, MegaBlocks, fairscale": {
        "Tutel's capacity is rounded down before the factor": (
            "moe_ext/integrations/tutel.py",
            "int(abs(factor) * [--(--]{+(+}num_tokens // self.num_experts))",
            "tests/integrations/test_tutel.py",
        ),
        "FastMoE's second expert stays too seldom": (
            "moe_ext/integrations/_base.py",
            "[-2 * -]weights_TK[:, 1].detach() >= drawn_T",
            "tests/integrations/test_fastmoe.py",
        ),
        "Paddle's GShard gate trains with the capacity of evaluation": (
            "moe_ext/integrations/paddle.py",
            "2)\n        rows = math.ceil(self.capacity[[-0-]{+1+} if",
            "tests/integrations/test_fastmoe.py",
        ),
        "MegaBlocks' weights are divided by another norm": (
            "moe_ext/integrations/megablocks.py",
            "weights.norm(p=[-order-]{+1.0+}, dim",
            "tests/integrations/test_megablocks.py",
        ),
        "fairscale's capacity is rounded up": (
            "moe_ext/integrations/fairscale.py",
            "capacity = [-2 * num_tokens // self.num_experts-]"
            "{+-(-2 * num_tokens // self.num_experts)+}",
            "tests/integrations/test_fairscale.py",
        ),
        "Tutel's noise is not divided by the number of experts": (
            "moe_ext/integrations/tutel.py",
            "torch.randn_like(logits_TE)[- / self.num_experts-]",
            "tests/integrations/test_tutel.py",
        ),
        "Tutel's capacity follows the tokens of this rank alone": (
            "moe_ext/integrations/tutel.py",
            "[-num_tokens = _largest(num_tokens, self._group.group, idx.device)-]{+pass+}",
            "tests/dispatch/test_other_libraries.py",
        ),
    },
    "DistributedDataParallel": {
        "DDP forgets that a pass outside no_sync wants a reduction": (
            "moe_ext/distributed/data_parallel.py",
            "self._wants = [-self._wants or -]_reduces(wrapper)",
            "tests/distributed/test_data_parallel.py -k take_back",
        ),
        "A gradient scaler looks at this rank's experts alone": (
            "moe_ext/distributed/clipping.py",
            "over = dict.fromkeys(group for p in held{+[:0]+} for group in sharding_groups(p))",
            "tests/distributed/test_data_parallel.py -k overflow",
        ),
    },
    "Horovod": {
        "Horovod's optimizer averages where it is told to sum": (
            "moe_ext/integrations/horovod.py",
            "        if [-self._op == Sum-]{+False+}:\n            for p in holder:",
            "tests/integrations/test_horovod.py",
        ),
        "Horovod's join helps the first optimizer alone": (
            "moe_ext/integrations/horovod.py",
            "gradients = _optimizers[[-others[0][0]-]{+0+}]",
            "tests/integrations/test_horovod.py",
        ),
        "Horovod's join names the lowest of the last ranks": (
            "moe_ext/integrations/horovod.py",
            "[-max-]{+min+}(_active, default",
            "tests/integrations/test_horovod.py",
        ),
        "Horovod's join adds the gradients of the last step again": (
            "moe_ext/integrations/horovod.py",
            "        gradients.[-clear()\n        gradients.-]reduce(",
            "tests/integrations/test_horovod.py",
        ),
    },
    "parameter server (Li et al.)": {
        "a worker pulls the whole table": (
            "examples/parameter_server.py",
            'rpc.rpc_sync("server", pull, ([-rows,))-]{+torch.arange(ROWS),))\n'
            "        pulled = pulled[rows]+}\n",
            "tests/examples/test_parameter_server.py",
        ),
        "a parameter server sums gradients where it should average": (
            "examples/parameter_server.py",
            "scale = -self.lr[- / self.num_workers-]",
            "tests/examples/test_parameter_server.py",
        ),
    },
    "BytePS": {
        "a tensor is cut by workers for servers": (
            "examples/all_reduce.py",
            "parts = x.tensor_split([-num_servers-]{+num_workers+})",
            "tests/examples/test_all_reduce.py -k any_number",
        ),
        "BytePS's servers average": (
            "examples/all_reduce.py",
            "torch.stack(received).[-sum-]{+mean+}(0)",
            "tests/examples/test_all_reduce.py -k any_number",
        ),
    },
    "all-reduces: ring, halving and doubling, tree, two levels": {
        "a tree has floor(log2 N) levels": (
            "examples/all_reduce.py",
            "range([-(size - 1).bit_length()-]{+size.bit_length() - 1+})",
            "tests/examples/test_all_reduce.py -k any_number",
        ),
        "a tree sends to ranks that are not there": (
            "examples/all_reduce.py",
            "        elif rank % (2 * distance) == 0[- and rank + distance < size-]:\n"
            "            send",
            "tests/examples/test_all_reduce.py -k any_number",
        ),
        "two levels cut a part by ranks of a node": (
            "examples/all_reduce.py",
            "mine.tensor_split([-len(ranks)-]{+node_size+})",
            "tests/examples/test_all_reduce.py -k any_number",
        ),
        "a ring in nodes does not gather what came from other nodes": (
            "examples/all_reduce.py",
            "    all_gather_ring(parts, ranks)[-\n    all_gather_ring(chunks, list(node))-]",
            "tests/examples/test_all_reduce.py -k any_number",
        ),
    },
    "sparse gradients of embeddings": {
        "sparse gradients become sums where means are wanted": (
            "moe_ext/compression/reducer.py",
            "            average=[-self.options.average-]{+False+},\n            validate=False,",
            "tests/compression/test_ddp_hook.py",
        )
    },
    "top-k with error feedback, QSGD, PowerSGD, GRACE's methods": {
        "GRACE's top-k sends one element more": (
            "moe_ext/integrations/grace.py",
            "ratio){+ + 1+}))\n        found = topk_compress_",
            "tests/integrations/test_grace.py",
        ),
        "PowerSGD starts from the same numbers in each step": (
            "moe_ext/compression/codecs/powersgd.py",
            "            if warm is not None:\n"
            "                [-warm.copy_(state.q_memory_dict[0])-]{+pass+}",
            "tests/compression/test_powersgd.py",
        ),
        "random places are the same in all steps": (
            "moe_ext/integrations/grace.py",
            'f"{self.seed}/{name}[-/{step}-]"',
            "tests/integrations/test_grace.py",
        ),
        "QSGD rounds alike on all ranks": (
            "moe_ext/integrations/grace.py",
            "tensor_id, step, [-global_rank()-]{+0+}]",
            "tests/integrations/test_grace.py",
        ),
        "QSGD rounds alike in all steps": (
            "moe_ext/integrations/grace.py",
            "tensor_id, [-step-]{+0+}, global_rank()]",
            "tests/integrations/test_grace.py",
        ),
        "a residual memory leaves the factor of gradients out": (
            "moe_ext/integrations/grace.py",
            "whole = [-self.gamma-]{+1.0+} * tensor",
            "tests/integrations/test_grace.py",
        ),
        "a residual memory leaves the factor of residuals out": (
            "moe_ext/integrations/grace.py",
            "whole.add_(residual[-, alpha=self.beta-])",
            "tests/integrations/test_grace.py",
        ),
    },
    "1-bit Adam, 1-bit LAMB, 0/1 Adam": {
        "1-bit LAMB's factor changes by any amount in a step": (
            "moe_ext/optim/one_bit_lamb.py",
            "factor_G[- = factor_G-].clamp(last_G",
            "tests/optim/test_one_bit_optimizers.py -k follows_gradients",
        ),
        "1-bit LAMB's bound on a change starts from what the factor would be": (
            "moe_ext/optim/one_bit_lamb.py",
            "last_G.copy_([-factor_G-]{+quotient.amax(dim=1).to(share_G)+})",
            "tests/optim/test_one_bit_optimizers.py -k follows_gradients",
        ),
        "1-bit LAMB's factor has no bounds": (
            "moe_ext/optim/one_bit_lamb.py",
            "[-        factor_G = factor_G.clamp(self._factor_min, self._factor_max)\n-]",
            "tests/optim/test_one_bit_optimizers.py -k follows_gradients",
        ),
        "1-bit LAMB corrects the fresh variance by the frozen step": (
            "moe_ext/optim/one_bit_lamb.py",
            'steps = [[-max(state["var_steps"], state["step"])-]{+state["var_steps"]+}]',
            "tests/optim/test_one_bit_optimizers.py -k follows_gradients",
        ),
        "1-bit LAMB's mean takes ratios of weights of zero": (
            "moe_ext/optim/one_bit_lamb.py",
            "[-torch.where(ratio_G == 1.0, mean_G, moved_G)-]{+moved_G+}",
            "tests/optim/test_one_bit_optimizers.py -k follows_gradients",
        ),
        "1-bit LAMB takes all of a factor with weight decay": (
            "moe_ext/optim/one_bit_lamb.py",
            "[-factor_G = factor_G * share_G + (1 - share_G)-]{+pass+}",
            "tests/optim/test_one_bit_optimizers.py -k follows_gradients",
        ),
        "1-bit Adam corrects momentum by the steps of the variance": (
            "moe_ext/optim/one_bit_adam.py",
            '(1 - beta1 ** state["[-step-]{+var_steps+}"])',
            "tests/optim/test_one_bit_optimizers.py -k one_bit_adam_alone",
        ),
        "0/1 Adam's local interval grows without bound": (
            "moe_ext/optim/zero_one_adam.py",
            "doubled[- if most is None else min(doubled, most)-]",
            "tests/optim/test_one_bit_optimizers.py -k zero_one_adam_alone",
        ),
    },
    "LARS, LAMB, Adafactor": {
        "LARS leaves weight decay out of its rate": (
            "moe_ext/optim/lars.py",
            '(grad_G + group["[-weight_decay"] * weight_G + group["-]eps"])',
            "tests/optim/test_dense_optimizers.py",
        ),
        "Adafactor's decay is a step late": (
            "moe_ext/optim/adafactor.py",
            '[-self.step-]{+(self.step + 1)+} ** self.entry.group["beta2_decay"]',
            "tests/optim/test_dense_optimizers.py",
        ),
        "Adafactor bounds means of squares by the root of their bound": (
            "moe_ext/optim/adafactor.py",
            "min=self.eps1[- * self.eps1-]",
            "tests/optim/test_dense_optimizers.py",
        ),
    },
    "ZeRO 1, 2, 3; FSDP": {
        "experts are wrapped without the options of FSDP2": (
            "moe_ext/distributed/fsdp.py",
            '"shard_placement_fn": dim[-, **options-]}\n    for wrapped',
            "tests/distributed/test_fsdp.py",
        ),
        "What FSDP2 leaves whole is averaged while gradients accumulate": (
            "moe_ext/distributed/fsdp_state.py",
            "return {+True or +}all(group.reduce_grads for group in groups)",
            "tests/distributed/test_fsdp.py -k accumul",
        ),
    },
    "ZeRO++": {
        "random rounding is the same on all ranks": (
            "moe_ext/compression/fsdp/messages.py",
            "self.step, [-group_rank(self._group)-]{+0+}]",
            "tests/compression/test_fsdp_compression.py -k unbiased",
        ),
        "random rounding is the same in all steps": (
            "moe_ext/compression/fsdp/messages.py",
            "self._key, [-self.step-]{+0+},",
            "tests/compression/test_fsdp_compression.py -k unbiased",
        ),
        "random rounding is the same in all modules": (
            "moe_ext/compression/fsdp/messages.py",
            "[-zlib.crc32(self.name.encode()) & 0xFFFF-]{+0+}",
            "tests/compression/test_fsdp_compression.py -k unbiased",
        ),
        "frozen weights alone are coded where all are to be": (
            "moe_ext/compression/fsdp/zero_plus_plus.py",
            "frozen_only=[-not zero_quantized_weights-]{+zero_quantized_nontrainable_weights+}",
            "tests/compression/test_fsdp_compression.py -k frozen_and",
        ),
        "messages of ZeRO++ have blocks of the default size": (
            "moe_ext/compression/fsdp/zero_plus_plus.py",
            '"block": [-block-]{+256+},',
            "tests/compression/test_fsdp_compression.py -k bytes_follow",
        ),
        "top-k between nodes has the default share": (
            "moe_ext/compression/fsdp/zero_plus_plus.py",
            "node_codec, node_group, [-density=density, -]**common",
            "tests/compression/test_fsdp_nodes.py -k its_share",
        ),
        "the least size that is coded is the default one": (
            "moe_ext/compression/fsdp/zero_plus_plus.py",
            '"min_numel": [-min_numel-]{+1024+},',
            "tests/compression/test_fsdp_compression.py -k without_codes",
        ),
    },
    "ZeRO-Offload's Adam": {
        "CPUAdamW does not scale gradients": (
            "moe_ext/optim/cpu_adamw.py",
            "grad_scale=[-grad_scale-]{+1.0+},",
            "tests/optim/test_cpu_adamw.py",
        )
    },
    "ZeRO-Infinity's tier": {
        "a step is committed without a rename": (
            "examples/offload_to_files.py",
            '        (self.folder / "[-next_step").write_text(str(self.step + 1))\n'
            '        os.replace(self.folder / "next_step", self.folder / "step"-]'
            '{+step").write_text(str(self.step + 1)+})\n',
            "tests/examples/test_offload_to_files.py -k commit",
        ),
        "a step in files is committed under the number before": (
            "examples/offload_to_files.py",
            "write_text(str([-self.step + 1-]{+max(0, self.step)+}))",
            "tests/examples/test_offload_to_files.py -k kill",
        ),
    },
    "torch.utils.checkpoint": {
        "a second forward pass counts loads again": (
            "moe_ext/nn/balance/counts.py",
            "    [-if in_backward():\n        return-]{+pass+}\n",
            "tests/nn/test_checkpointing.py -k count_once",
        )
    },
    "Revolve (Algorithm 799)": {
        "a chain gives its second part too many slots": (
            "moe_ext/nn/checkpointing.py",
            "_extra_runs(len(modules) - m, slots[- - 1-])",
            "tests/nn/test_checkpointing.py",
        )
    },
    "DeepSpeed's transformer kernel": {
        "an inverted norm has the default epsilon": (
            "examples/lean_block.py",
            "self.bias, [-self.eps-]{+1e-5+})",
            "tests/examples/test_lean_block.py -k epsilon",
        ),
        "an inverted norm sums its output for the weight": (
            "examples/lean_block.py",
            "(rows * [-normal-]{+y+}.flatten(0, -2)).sum(0)",
            "tests/examples/test_lean_block.py",
        ),
    },
    "memory-efficient attention (Rabe and Staats)": {
        "lean attention keeps its softmax": (
            "examples/lean_block.py",
            "return [-ring_attention(q, k, v, group=None, is_causal=True-]"
            "{+plain_attention(q, k, v+})",
            "tests/examples/test_lean_block.py -k peak_memory",
        )
    },
    "Megatron's columns and rows": {
        "shards of layers keep the gradients of their own rank": (
            "moe_ext/distributed/gradients.py",
            "        [-average_gradients(replica_group(group, device), parameters)-]{+pass+}\n",
            "tests/distributed/test_axes.py",
        )
    },
    "Megatron's columns and rows, for our layers": {
        "columns of gates come beside other ups": (
            "moe_ext/nn/feed_forward.py",
            "taker = [-columns % num_ups * num_ranks // num_ups-]{+holder+}",
            "tests/nn/test_parallelize_module.py",
        ),
        "columns of gates come in the order they are sent": (
            "moe_ext/nn/feed_forward.py",
            "[-takers.argsort(stable=True).tolist(-]{+list(range(len(takers))+})",
            "tests/nn/test_parallelize_module.py",
        ),
    },
    "Megatron's sequence parallelism": {
        "dropout over ranks draws by a rank's own positions": (
            "moe_ext/attention/sequence_parallel_mlp.py",
            "(starts_B[:, None] + [-positions_L-]{+torch.arange(len(positions_L))+}).flatten()",
            "tests/attention/test_sequence_parallel_mlp.py",
        )
    },
    "Ring Self-Attention (Li et al.)": {
        "ring self-attention forgets the scale in the gradient of queries": (
            "moe_ext/attention/rsa.py",
            "grad_q.[-mul_(call.options.scale).-]view(q.shape)",
            "tests/attention/test_ring_self_attention.py",
        )
    },
    "ring attention, Ulysses, both in two dimensions": {
        "heads of another rank are taken for the first ones in dropout": (
            "moe_ext/attention/schemes/ulysses.py",
            "first_head=[-mine.start-]{+0+}",
            "tests/attention/test_schemes_over_ranks.py",
        ),
        "a head's slope is that of a head of the first rank": (
            "moe_ext/attention/schemes/ulysses.py",
            "call.alibi_slopes[[-mine-]{+: len(share.queries)+}]",
            "tests/attention/test_schemes_over_ranks.py",
        ),
    },
    "Mesh-TensorFlow": {
        "a layout divides the first dimension alone": (
            "moe_ext/distributed/named_dimensions.py",
            "placements[axis] = Shard([-dim-]{+0+})",
            "tests/distributed/test_named_dimensions.py -k layouts",
        )
    },
    "2-D, 2.5-D, 3-D products (Colossal-AI)": {
        "blocks of a product are divided one way": (
            "moe_ext/distributed/named_dimensions.py",
            "placements[[-axis-]{+-1+}] = Shard(dim)",
            "tests/distributed/test_named_dimensions.py -k dimensions",
        )
    },
    "GSPMD, DTensor": {
        "first choices of GShard's gate are counted as whole": (
            "moe_ext/ops/sharding_rules.py",
            '"gshard_gate": ["0 0 + + [-+-]{+-+} <-',
            "tests/ops/test_sharding_rules.py",
        )
    },
    "GPipe": {
        "GPipe is 1F1B": (
            "moe_ext/pipeline/schedules.py",
            '{"gpipe": [-_gpipe-]{+_one_f_one_b+},',
            "tests/pipeline/test_table.py",
        )
    },
    "DAPPLE, PipeDream-Flush, Megatron's 1F1B": {
        "1F1B runs one forward pass more ahead": (
            "moe_ext/pipeline/schedules.py",
            "ahead = min(after{+ + 1+}, micro)",
            "tests/pipeline/test_check.py -k in_flight",
        )
    },
    "Megatron's interleaved 1F1B, looped BFS": {
        "interleaved runs all forward passes first": (
            "moe_ext/pipeline/schedules.py",
            "ahead = [-min(total, (count - 1) * each + 2 * (num_ranks - 1 - rank))-]{+total+}",
            "tests/pipeline/test_table.py",
        ),
        "looped BFS is interleaved 1F1B": (
            "moe_ext/pipeline/schedules.py",
            '"[-LoopedBFS-]{+Interleaved1F1B+}"',
            "tests/pipeline/test_table.py",
        ),
    },
    "zero bubble, ZBV, DualPipeV": {
        "ZB-H1 delays gradients of weights by another number": (
            "moe_ext/pipeline/schedules.py",
            'if kind == "B" and i >= [-rank:\n            order.append(("W", i - rank))\n'
            '    return order + [("W", i) for i in range(max(0, micro - rank-]{+after:\n'
            '            order.append(("W", i - after))\n'
            '    return order + [("W", i) for i in range(max(0, micro - after+}), micro)]',
            "tests/pipeline/test_simulate.py",
        ),
        "zero bubble is interleaved 1F1B": (
            "moe_ext/pipeline/schedules.py",
            '"[-InterleavedZeroBubble-]{+Interleaved1F1B+}"',
            "tests/pipeline/test_table.py",
        ),
        "ZB-V is DualPipeV": (
            "moe_ext/pipeline/schedules.py",
            '"[-ZBVZeroBubble-]{+DualPipeV+}"',
            "tests/pipeline/test_simulate.py",
        ),
    },
    "PipeDream": {
        "PipeDream takes the versions of HetPipe": (
            "moe_ext/pipeline/schedules.py",
            '"pipedream": [-made-]{+max(0, i - num_ranks + 1)+}',
            "tests/pipeline/test_asynchronous.py",
        )
    },
    "PipeDream-2BW": {
        "PipeDream-2BW counts updates by ranks": (
            "moe_ext/pipeline/schedules.py",
            "i // [-every-]{+num_ranks+} - 1",
            "tests/pipeline/test_asynchronous.py -k pipedream-2bw",
        ),
        "PipeDream-2BW takes the newest weights": (
            "moe_ext/pipeline/schedules.py",
            "[-max(0, i // every - 1)-]{+i // every+}",
            "tests/pipeline/test_asynchronous.py",
        ),
    },
    "HetPipe": {
        "a wave counts its own updates again": (
            "moe_ext/pipeline/waves.py",
            "        self._after_wave = [-now-]{+self._common+}\n",
            "tests/pipeline/test_asynchronous.py",
        )
    },
    "Chimera": {
        "a stage of Chimera holds as many micro-batches as there are ranks": (
            "moe_ext/pipeline/schedules.py",
            "room = min(num_ranks - action.stage, num_ranks[- // 2-])",
            "tests/pipeline/test_asynchronous.py -k papers",
        )
    },
    "TeraPipe": {
        "slices pay for a rank too many": (
            "moe_ext/pipeline/slices.py",
            "if total + [-(num_ranks - 1) * largest < best:\n"
            "            best, lengths = total + (num_ranks - 1)-]"
            "{+num_ranks * largest < best:\n"
            "            best, lengths = total + num_ranks+} * largest,",
            "tests/pipeline/test_asynchronous.py -k slices_are",
        ),
        "slices of TeraPipe have the cost of what is before them alone": (
            "moe_ext/pipeline/slices.py",
            "cost((end - start) * multiple, [-start-]{+end+} * multiple)",
            "tests/pipeline/test_asynchronous.py -k slices_are",
        ),
    },
    "GPT-3, Gopher, PanGu, Jurassic-1, Yuan, ERNIE Titan, GLaM, M6-10T, T5": {
        "latent attention without the matrix of its values": (
            "moe_ext/planner/presets.py",
            "keys * [-(plain + values)-]{+plain+})",
            "tests/planner/test_model_presets.py -k latent",
        ),
        "a token of M6-10T goes to one expert": (
            "moe_ext/planner/presets.py",
            "top_k=[-80-]{+1+}",
            "tests/planner/test_model_presets.py -k of_a_token",
        ),
        "Kimi K2 has the ranks of its latents swapped": (
            "moe_ext/planner/presets.py",
            "        shared_ffn_dim=2048,\n"
            "        latent=([-1536, 512-]{+512, 1536+}, 128, 64, 128),\n"
            "        published=1.04e12",
            "tests/planner/test_model_presets.py",
        ),
        "the dense layers of DeepSeek-V3 are as narrow as experts": (
            "moe_ext/planner/presets.py",
            "        num_moe_layers=58,\n        dense_ffn_dim=[-18432-]{+2048+},",
            "tests/planner/test_model_presets.py",
        ),
    },
    "planner searches": {
        "double recursion does not look at neighbours": (
            "examples/planner_searches/double_recursion.py",
            "own[- + sum(table[o][chosen[j]] for j, table in problem.neighbours[i] if j in "
            "chosen)-]",
            "tests/examples/test_planner_searches.py -k by_hand",
        )
    },
}
