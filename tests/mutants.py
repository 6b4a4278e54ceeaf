"""Seeded breakages, to see that the suite catches each: python tests/mutants.py

Each is one replacement in a scratch copy of the tree, whose text tells where it is; the tests
beside it have to fail then. Those of C++ compile the objects that include the file, with the
commands of a build folder, and link one library anew. Ends with 1 if one is missed, or its text or
its tests are no longer there.
"""

import argparse
import ast
import collections
import concurrent.futures
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from system_mutants import BY_SYSTEM

ROOT = Path(__file__).resolve().parent.parent
# Library to its target in the build folder.
LIBRARIES = {"_C": "csrc/_C.so", "_C_simt": "_C_simt", "_runtime": "csrc/_runtime.so"}
_CHANGE = re.compile(r"\[-(.*?)-\]|\{\+(.*?)\+\}", re.DOTALL)


@dataclass(frozen=True)
class Mutant:
    """A breakage.

    Attributes:
        name: of what is wrong then.
        files: of which exactly one holds the text, a pattern.
        change: the text, with [-what goes-] and {+what comes+} in it as in `git diff --word-diff`.
        tests: arguments of pytest; at least one of these tests has to fail.
        library: that is linked anew, None for Python.
    """

    name: str
    files: str
    change: str
    tests: str
    library: str | None = None

    @property
    def old(self):
        return _CHANGE.sub(r"\1", self.change)

    @property
    def new(self):
        return _CHANGE.sub(r"\2", self.change)


# Name to (files, change, tests): those that need no compiler, and by the library linked anew.
MISTAKES = {
    None: {
        "memory that W reads on its stream goes to the next tensors of the main one": (
            "moe_ext/pipeline/step.py",
            "purpose=_WEIGHTS[-, held=tuple(nodes)-])",
            "tests/pipeline/test_weight_stream.py",
        ),
        "a backward pass adds to gradients that W on its stream is adding to": (
            "moe_ext/pipeline/step.py",
            "adds to the same gradients.\n[-        self.join()\n-]",
            "tests/pipeline/test_weight_stream.py",
        ),
        "nodes of weights stay on the main stream": (
            "moe_ext/pipeline/step.py",
            "                    [-self.weight_stream.take(out)-]{+pass+}",
            "tests/pipeline/test_weight_stream.py",
        ),
        "replicate without ignored_modules gives all ranks the experts of rank 0": (
            "moe_ext/distributed/placement.py",
            "        if [-name in module.__dict__.get(_DIVIDED, ())-]{+False+}:",
            "tests/distributed/test_clipping_matrix.py -k 'functions and without'",
        ),
        "the data of a DTensor is assigned without effect, and nothing says so": (
            "moe_ext/distributed/placement.py",
            "    if [-noted is not None and noted[0] == own[0]-]{+False+}:",
            "tests/distributed/test_clipping_matrix.py -k 'functions and EMAs'",
        ),
        "gradients of experts over ranks are not added to where they lie": (
            "moe_ext/distributed/dtensor.py",
            "    return [-grad._local_tensor, parameter._local_tensor-]{+None+}",
            "tests/dispatch/test_overlap.py -k added_to_parts",
        ),
        "every process that imports the library has something to do at its exit": (
            "moe_ext/comm/at_exit.py",
            "    _waits.append(wait){+\n    atexit.register(wait, 0.0)+}",
            "tests/distributed/test_nothing_replaced.py -k one_process",
        ),
        "ranks that do not follow each other share memory": (
            "moe_ext/comm/shared_memory.py",
            "can = memory is not None[- and len(here) == end - first-]",
            "tests/comm/test_shared_memory.py -k whom_they_are_for",
        ),
        "a rank without the compiled module is sent to through memory": (
            "moe_ext/comm/shared_memory.py",
            "len(here) > 1[- and all(each for (each,) in told[first:end])-]",
            "tests/comm/test_shared_memory.py -k without_the_module",
        ),
        "sums through memory leave out what no rank has a part of": (
            "moe_ext/comm/collectives.py",
            "piece[: size * length], piece[size * length :[-]-]{+][:0]+}",
            "tests/comm/test_shared_memory.py -k those_of_one_process",
        ),
        "maxima through memory are sums": (
            "moe_ext/comm/collectives.py",
            "dist.ReduceOp.MAX, torch.[-maximum-]{+add+}",
            "tests/comm/test_shared_memory.py -k those_of_one_process",
        ),
        "sums of long tensors go by Gloo's sockets": (
            "moe_ext/comm/collectives.py",
            "if neighbours(group, x.device, operation).are_all{+ and x.nbytes < _SHARED_BYTES+}:",
            "tests/comm/test_shared_memory.py -k those_of_one_process",
        ),
        "groups made beside one whose ranks are in another order have them sorted": (
            "moe_ext/comm/c10d.py",
            "            use_local_synchronization=True,[-\n            **IN_ORDER,-]",
            "tests/comm/test_comm.py -k groups",
        ),
        "each of the ranks that share experts moves the bias by its own tokens": (
            "moe_ext/nn/balance/selection_bias.py",
            "    if [-group is None and max-]{+False and max+}(map(group_size, groups)) > 1:",
            "tests/distributed/test_balance_over_ranks.py -k one_of_the_ranks",
        ),
        "the decay of DeMo moves frozen parameters": (
            "moe_ext/optim/demo.py",
            "                if [-parameter.requires_grad-]{+True+}:",
            "tests/optim/test_diloco.py -k frozen",
        ),
        "a pruned weight is reduced by the mask of another whose name ends alike": (
            "moe_ext/compression/pruning.py",
            'found = {[-name-]{+f"*{name}"+}: Masked(mask) for name, mask in self.masks.items()}',
            "tests/compression/test_pruning.py -k codec_of_its_mask",
        ),
        "weights of a loss get no gradient where I and W are apart": (
            "moe_ext/pipeline/step.py",
            "leaf is not state.x{+ and any(leaf is p for m in self.setup.stages.values() for p in "
            "m.parameters())+})",
            "tests/pipeline/test_stages.py -k gradients_of_one_process",
        ),
        "buckets of DistributedDataParallel are read as contiguous": (
            "moe_ext/compression/ddp.py",
            "if buffer_N.layout != torch.strided or {+True or +}all(p.is_contiguous() for p in par",
            "tests/compression/test_ddp_hook.py -k any_strides",
        ),
        "a recomputed round of a row budget draws other numbers": (
            "moe_ext/nn/parts.py",
            "TorchState.now(x_TD.device, draws=[-draws-]{+False+})",
            "tests/nn/test_row_budget.py -k draws_the_same",
        ),
        "autocast rounds the products of recurrences": (
            "moe_ext/attention/recurrent/functional.py",
            "    with [-without_autocast(v.device)-]"
            "{+torch.set_grad_enabled(torch.is_grad_enabled())+}:",
            "tests/attention/test_recurrent.py -k float32_under_autocast",
        ),
        "a weight of two fragments takes two outer steps": (
            "moe_ext/optim/local_steps.py",
            "            [-self._seen.add(parameter)-]{+pass+}",
            "tests/optim/test_diloco.py -k two_fragments",
        ),
        "half of the operations of attention are counted": (
            "moe_ext/ops/flops.py",
            "return [-2 * -]prod(q[:3]) * k[2] * (q[3] + v[3])",
            "tests/ops/test_flops.py",
        ),
        "autograd does not see what an operator writes": (
            "moe_ext/ops/delta.py",
            "    [-torch.autograd.graph.increment_version(target)-]{+pass+}",
            "tests/ops/test_opcheck.py -k version",
        ),
        "the others do not hear of an error at the end of a backward pass": (
            "moe_ext/comm/reports.py",
            "[-c10d.call_after_backward-]"
            "{+torch.autograd.Variable._execution_engine.queue_callback+}(_BackwardPass(number))",
            "tests/comm/test_reports.py -k backward_pass_after",
        ),
        "a thread stays traced after an error that came unseen": (
            "moe_ext/comm/reports.py",
            "[-any(f is caller for f, _ in traceback.walk_stack(frame))-]{+True+}",
            "tests/comm/test_reports.py -k debugger",
        ),
        "what experts that are a module each owe is of those of other ranks too": (
            "moe_ext/compression/fsdp/zero_plus_plus.py",
            "if [-not is_alone or like.shape == source.shape-]{+True+}:",
            "tests/compression/test_fsdp_experts.py -k another_number_of_ranks",
        ),
        "a limit on rows takes what is no number": (
            "moe_ext/dispatch/parts.py",
            '[-check_numbers("RowBudget", RowBudget.__annotations__, vars(self))-]{+pass+}',
            "tests/test_argument_types.py -k 'by_name and RowBudget'",
        ),
        "options of a layer are not compared over the ranks": (
            "moe_ext/nn/moe_layer.py",
            'dispatcher.group).compare({"options": [-options-]{+{}+}})',
            "tests/test_options_over_ranks.py -k 'activation and over_ranks'",
        ),
        "routers that drift apart are not looked at": (
            "moe_ext/nn/moe_layer.py",
            "        if [-looks-]{+False+}:\n",
            "tests/distributed/test_gradients.py -k 'forgotten or apart'",
        ),
        "one process refuses a dispatcher's name that is for many": (
            "moe_ext/dispatch/by_name.py",
            "    if [-group is None or alone-]"
            '{+(group is None or alone) and name in ("auto", "local")+}:',
            "tests/nn/test_moe_layer.py -k written_for_many",
        ),
        "options that do not go together are taken": (
            "moe_ext/nn/combinations.py",
            "        if [-first in found and second in found-]{+False+}:",
            "tests/nn/test_combinations.py -k 'row_budget and vmap'",
        ),
        "rounds are sent by a dispatcher that knows none": (
            "moe_ext/dispatch/allgather.py",
            '{"overlap", "[-row_budget", "-]wire',
            "tests/nn/test_combinations.py -k 'page or (row_budget and allgather)'",
        ),
        "a changed option does not travel with the counts": (
            "moe_ext/dispatch/counts.py",
            "graph += [-_GRAPH_CODES * self._checksum-]{+0+}",
            "tests/test_options_over_ranks.py -k change_later",
        ),
        "options of a module around a ring are not compared": (
            "moe_ext/attention/call.py",
            "if [-options.told-]{+False+}:",
            "tests/test_options_over_ranks.py -k TransformerBlock",
        ),
        "another rotary base on one rank goes unnoticed": (
            "moe_ext/attention/rsa.py",
            '[-"rotary_base": self.rotary_base,-]',
            "tests/test_options_over_ranks.py -k RingSelfAttention",
        ),
        "options of a layer are compared behind those of its first exchange": (
            "moe_ext/nn/moe_layer.py",
            "        if [-watched is None and not dispatcher._calls.layers-]{+False+}:",
            "tests/test_options_over_ranks.py -k 'over_ranks and Dispatch-rebalance'",
        ),
        "options that change are not compared with the sums of norms": (
            "moe_ext/comm/agreement.py",
            "* squares [-!= total * total-]{+< 0+}:",
            "tests/test_options_over_ranks.py -k rates_of_shards",
        ),
        "replica groups of a manager do not compare their options": (
            "moe_ext/optim/local_steps.py",
            "found = [-self._find_other_option(marks_N)-]{+None+}",
            "tests/test_options_over_ranks.py -k rounds_of_a_manager",
        ),
        "one rank sends in another way than the others since its options changed": (
            "moe_ext/nn/layer_options.py",
            "if [-new != old-]{+False+}:\n            with layer.dispatcher.routing",
            "tests/test_options_over_ranks.py -k other_messages",
        ),
        "replicas update a selection bias at rates of their own": (
            "moe_ext/nn/balance/selection_bias.py",
            "[-options.check([marks], [[group]])-]{+pass+}",
            "tests/test_options_over_ranks.py -k selection_bias",
        ),
        "ranks clip to norms of their own": (
            "moe_ext/distributed/clipping.py",
            "for (name, value), values in [-zip(options.items(), compared, strict=True-]{+(+}):",
            "tests/test_options_over_ranks.py -k 'over_ranks and clip_grad'",
        ),
        "ranks scale the gradients of a mean over tokens each in its own way": (
            "moe_ext/attention/sharding.py",
            "[-compared.check([sums[2:]], [[group]])-]{+pass+}",
            "tests/test_options_over_ranks.py -k 'over_ranks and token_mean'",
        ),
        "ranks put a sequence together in orders of their own": (
            "moe_ext/attention/sharding.py",
            '"[-layout": layout,\n            "-]cu_seqlens": check_cu',
            "tests/test_options_over_ranks.py -k 'over_ranks and unshard'",
        ),
        "the gates of Tutel's layer differ between ranks": (
            "moe_ext/integrations/tutel.py",
            "return ([-*found, vars(self.call)-])",
            "tests/test_options_over_ranks.py -k 'over_ranks and facades'",
        ),
        "a round goes on from its beginning after it was saved in its middle": (
            "moe_ext/optim/local_steps.py",
            'int(state["round"]), [-int(state["local_step"])-]{+0+}',
            "tests/distributed/test_resume.py -k beside",
        ),
        "balance losses inside of vmap do not reach the router": (
            "moe_ext/nn/balance/losses.py",
            'is_compiling()[- or (is_transformed() and "vmap" in transforms())-]',
            "tests/nn/test_transforms.py -k 'sigmoid or capacity'",
        ),
        "a rank without a gradient leaves it out of the norms over ranks": (
            "moe_ext/optim/_sliced.py",
            "if [-self._exchanges_over(entry)-]{+False+}:\n                    found",
            "tests/test_options_over_ranks.py -k one_rank_has_not",
        ),
        'an optimizer takes "False" for true': (
            "moe_ext/_checks.py",
            "if [-isinstance(value, str)-]{+False+}:",
            "tests/test_argument_types.py -k 'by_name and LARS'",
        ),
        "a constructor takes NaN": (
            "moe_ext/_checks.py",
            "        elif [-value != value-]{+False+}:",
            "tests/test_argument_types.py -k 'by_name and Arguments'",
        ),
        "a constructor takes a negative size": (
            "moe_ext/_checks.py",
            "if [-value < 0 and name in may_be_zero-]{+False+}:",
            "tests/test_argument_types.py -k 'by_name and CostModel'",
        ),
        "each projection of a tp rank sends its own gradient of their input": (
            "moe_ext/integrations/huggingface/tensor_parallel.py",
            "        if [-len(columns) > 1-]{+False+}:",
            "tests/planner/test_apply.py -k columns_of_one",
        ),
        "what tensor parallelism was measured to take is left out of plans": (
            "moe_ext/planner/passes.py",
            '[-tensor = tensor * sizes.measured("tensor")-]{+pass+}',
            "tests/planner/test_profile.py -k parts_take",
        ),
        "messages of FSDP are coded in several ways": (
            "moe_ext/compression/fsdp/messages.py",
            "if [-group not in self._compared-]{+False+}:",
            "tests/test_options_over_ranks.py -k zero_plus_plus",
        ),
        "ranks lay out meshes of several shapes": (
            "moe_ext/distributed/mesh.py",
            "validate=[-not is_fake-]{+False+}",
            "tests/test_options_over_ranks.py -k MoEMesh",
        ),
        "compressors of GRACE differ between ranks": (
            "moe_ext/integrations/grace.py",
            '[-**options_of(self.compressor, "compressor"),-]',
            "tests/test_options_over_ranks.py -k grace",
        ),
        "each rank goes by the speed that it has measured": (
            "moe_ext/nn/balance/moved.py",
            "first = share(words, group, device, operation=_OPERATION)[[-0-]{+group_rank(group)+}]",
            "tests/test_options_over_ranks.py -k ranks_measure",
        ),
        "a balance loss of padding alone is NaN on all ranks": (
            "moe_ext/attention/huggingface/prepare.py",
            '[-_require(bool(mask.any()), "output_router_logits", rule, "True")-]{+pass+}',
            "tests/integrations/huggingface/test_prepared_models.py -k balance_loss",
        ),
        "a Trainer that saves on rank 0 alone trains up to its first save": (
            "moe_ext/integrations/huggingface/expert_parallel.py",
            "if [-mode and group_size(self._ep_group.group) > 1-]{+False+}:",
            "tests/integrations/huggingface/test_trainer.py -k lose_steps",
        ),
        "an optimizer made before replace trains what no module has any more": (
            "moe_ext/distributed/spread.py",
            "    if [-held-]{+False+}:\n",
            "tests/integrations/huggingface/test_expert_parallel.py -k refusals",
        ),
        "parallelize cuts experts that differ between ranks": (
            "moe_ext/distributed/spread.py",
            '(seed every rank alike)"] = [-fingerprint(named)-]{+0+}',
            "tests/distributed/test_spread.py -k everything_else",
        ),
        "parallelize leaves experts whole that no layer spreads": (
            "moe_ext/distributed/spread.py",
            "    if [-left or (not places and mesh.pp_size == 1)-]{+False+}:\n",
            "tests/distributed/test_spread.py -k everything_else",
        ),
        "parallelize takes experts for spread that lie over other ranks": (
            "moe_ext/distributed/spread.py",
            "        if [-group_ranks(other) != group_ranks(group)-]{+False+}:\n",
            "tests/distributed/test_spread.py -k everything_else",
        ),
        "parallelize leaves parts in the place of experts where it raises": (
            "moe_ext/distributed/spread.py",
            "        [-_put(before)\n        -]raise\n",
            "tests/distributed/test_spread.py -k everything_else",
        ),
        "FSDP2 divides gradients of experts once more, and nothing says so": (
            "moe_ext/distributed/fsdp_state.py",
            "        if [-scales-]{+False+} and not any(",
            "tests/distributed/test_fsdp.py -k divisors",
        ),
        "the mesh of the dense part has no name that a tool could tell it by": (
            "moe_ext/distributed/mesh.py",
            '[-, mesh_dim_names=("fsdp",)-]',
            "tests/distributed/test_fsdp.py -k norms_by_names",
        ),
        "a layer keeps its rows on this rank after parallelize": (
            "moe_ext/nn/moe_layer.py",
            "        [-self._take_group(ep_group, dispatcher)-]{+pass+}\n",
            "tests/distributed/test_spread.py -k ran_alone",
        ),
        "another learning rate on one rank goes unnoticed in a step of DeMo": (
            "moe_ext/optim/demo.py",
            "self.marks.append([-(payload[-_MARK_BYTES:] == self.marks[0]).all(-]"
            "{+self.marks[0].new_ones(()+}))",
            "tests/test_options_over_ranks.py -k rates_that_change",
        ),
        "columns of one of K, or of no tokens, are not sent as bytes": (
            "moe_ext/dispatch/token_exchange.py",
            "[-as_bytes(column).view(len(column), width-]{+column.contiguous().view(torch.uint8+})",
            "tests/test_smallest.py -k experts",
        ),
        "a rank without positions cannot have documents of each row": (
            "moe_ext/attention/functional.py",
            "out.view(heads, batch, length, [-out.shape[3]-]{+-1+})",
            "tests/test_smallest.py -k attention",
        ),
        "a message stands before one that it comes of": (
            "moe_ext/pipeline/step.py",
            "the thread waited for it first.\n                    [-return-]{+continue+}",
            "tests/test_smallest.py -k pipelines",
        ),
        "an error that a rank raises before it compares loses its class": (
            "moe_ext/comm/agreement.py",
            "self.compare({}, problem=[-error-]{+str(error)+})",
            "tests/comm/test_comm.py -k an_error_in_its_context",
        ),
        "ranks that are gone are not told to those who do not miss them": (
            "moe_ext/comm/agreement.py",
            '"ranks": [-list(problem.ranks) if isinstance(problem, RankFailureError) else -]None',
            "tests/comm/test_failures.py -k any_dispatcher",
        ),
        "a rank that was stopped and goes on is blamed by nobody": (
            "moe_ext/comm/failures.py",
            "call.stopped [-|-]{+&+}= {",
            "tests/comm/test_failures.py -k SIGCONT",
        ),
        "packed documents count as one sequence": (
            "moe_ext/nn/balance/losses.py",
            "return [-ids_BS, most +-]{+torch.zeros_like(ids_BS),+} 1",
            "tests/nn/test_balance.py -k packed_documents",
        ),
        "the choices of a document are those of this rank's shard": (
            "moe_ext/nn/balance/losses.py",
            "[-counts_NE = collectives.all_reduce_(counts_NE, documents.group, "
            'operation="Balance")-]{+pass+}',
            "tests/distributed/test_balance_over_ranks.py -k sequences_over_ranks",
        ),
        "a block does not tell its layer of documents": (
            "moe_ext/nn/transformer_block.py",
            "if [-cu_seqlens is not None-]{+False+} and _by_sequence(self.ffn)",
            "tests/nn/test_balance.py -k transformer_block",
        ),
        "a slot without room goes to a group that its token did not choose": (
            "moe_ext/nn/capacity.py",
            "    if [-limited-]{+False+}:\n        key_TE",
            "tests/nn/test_limits.py -k groups_of_the_token",
        ),
        "a slot without room goes to an expert at minus infinity": (
            "moe_ext/nn/capacity.py",
            "[-key_TE = key_TE.where(logits_TE > -math.inf, -math.inf)-]{+pass+}",
            "tests/nn/test_limits.py -k minus_infinity",
        ),
        "a feed-forward network without a gate is planned as a gated one": (
            "moe_ext/planner/spec.py",
            "gated = share > [-2-]{+1+}.5",
            "tests/planner/test_spec.py -k sizes_are_read",
        ),
        "a library gives wrong numbers and is taken": (
            "moe_ext/_trial.py",
            "if not off <= [-most-]{+9+}:",
            "tests/attention/test_recurrent_providers.py -k with_a_fault",
        ),
        "a library's documents begin with the state of another row": (
            "moe_ext/attention/recurrent/providers.py",
            "firsts = torch.[-tensor([0, *(lasts + 1)][:batch]-]{+arange(batch+}, device=v.device)",
            "tests/attention/test_recurrent_providers.py -k library_gives_what",
        ),
        "attention of any number of parameters is planned": (
            "moe_ext/planner/spec.py",
            "if abs(count - wanted) <= [-_OFF-]{+9+} * wanted:",
            "tests/planner/test_spec.py -k without_a_cost",
        ),
        "a gate of attention is planned as none": (
            "moe_ext/planner/spec.py",
            "        if count == gated:\n            return [-True-]{+False+}",
            "tests/planner/test_recurrent_models.py -k every_parameter",
        ),
        "recurrences of a plan wait for no message": (
            "moe_ext/planner/passes.py",
            'found["states"] = [-here.recurrent-]{+0+} * self.exchange.states(c)',
            "tests/planner/test_recurrent_models.py -k scheme_is_that",
        ),
        "layers are computed again though their stage fits without": (
            "moe_ext/planner/stage_layers.py",
            "return with_most([-low-]{+count+})",
            "tests/planner/test_stage_layers.py -k no_division",
        ),
        "numbers that are not finite make plans": (
            "moe_ext/_checks.py",
            "elif [-not abs(value) <= sys.float_info.max-]{+False+}:",
            "tests/planner/test_spec.py -k garbage",
        ),
        "a measured machine keeps the host of the preset": (
            "moe_ext/planner/profile.py",
            "        host=[-None-]{+cluster.host+},",
            "tests/planner/test_profile.py -k give_back",
        ),
        "more ranks are planned than the cluster joins": (
            "moe_ext/planner/sizes.py",
            '"num_ranks", ranks, rule, [-ranks <= most-]{+True+})',
            "tests/planner/test_spec.py -k ranks_are_those",
        ),
        "levels of a cluster fill no whole ones": (
            "moe_ext/planner/cluster.py",
            "inner >= outer[- or outer % inner-]",
            "tests/planner/test_spec.py -k files_of_clusters",
        ),
        "a codec is given up for the first time that it takes": (
            "moe_ext/compression/cost_model.py",
            "not codec.plain and known.count < [-TRIAL_TURNS-]{+1+}",
            "tests/compression/test_cost_model.py -k disturbed_turns",
        ),
        "a plain all-reduce is tried on where it is clear that it is slower": (
            "moe_ext/compression/cost_model.py",
            "predicted) > [-CLEAR_SHARE_AGAIN-]{+0.0+}",
            "tests/compression/test_cost_model.py -k two_turns_end",
        ),
        "presets of clusters have nominal links": (
            "moe_ext/planner/cluster.py",
            "bandwidth=[-LINK_SHARE * -]level.bandwidth",
            "tests/test_planner_benchmark.py -k what_the_presets_have",
        ),
        "a file of a plan without an axis has its default": (
            "moe_ext/planner/plan.py",
            "    if [-missing-]{+False+}:\n",
            "tests/planner/test_spec.py -k files_of_plans",
        ),
        "a plan is put into a model of other heads": (
            "moe_ext/planner/apply.py",
            '[-"heads_dim", "kv_dim", -]',
            "tests/planner/test_spec.py -k compares_all_sizes",
        ),
        "a search begins whose files cannot be written": (
            "moe_ext/planner/cli.py",
            "        if [-is_written and-]{+False and+} (not path.parent.is_dir() or",
            "tests/planner/test_spec.py -k command_says",
        ),
        "a plan forgets that another program hides gradients": (
            "moe_ext/planner/plan.py",
            'for each in fields(Job){+ if each.name != "hidden_gradients"+}}',
            "tests/planner/test_spec.py -k say_all",
        ),
        "the command cannot say the format of layers": (
            "moe_ext/planner/cli.py",
            'for each in fields(Job){+ if each.name != "layer_dtype"+}}',
            "tests/planner/test_spec.py -k say_all",
        ),
        "a search tells nothing where there is no terminal": (
            "moe_ext/planner/cli.py",
            '[-print(f"moe_ext plan: {text}", file=sys.stderr, flush=True)-]{+pass+}',
            "tests/planner/test_spec.py -k without_a_terminal",
        ),
        "the printed command starts a script that reads no plan": (
            "moe_ext/planner/plan.py",
            'script: str = "[-examples/train_moe_lm-]{+train+}.py"',
            "tests/planner/test_plan.py -k test_command",
        ),
        "the form of a model's loss is asked with logits that its weights make alike": (
            "moe_ext/attention/huggingface/probe.py",
            "if [-isinstance(head, nn.Module)-]{+False+}:",
            "tests/integrations/huggingface/test_prepared_models.py -k no_weights_make",
        ),
        "a rank that torchrun started trains alone where no process group was made": (
            "moe_ext/comm/groups.py",
            "int(started) > [-1-]{+10+}",
            "tests/comm/test_groups.py",
        ),
        "a checkpoint leaves learning rates to the optimizer that loads": (
            "moe_ext/distributed/training_state.py",
            "            [-group.update(found_options)-]{+pass+}\n",
            "tests/distributed/test_resume.py -k groups_may_be_others",
        ),
        "each rank goes on with the mean of the ranks' momentums": (
            "moe_ext/optim/demo.py",
            'state.get([-f"momentum{OF_RANKS}", state.get("momentum")-]{+"momentum"+})',
            "tests/distributed/test_resume.py -k as_many",
        ),
        "numbers of parameters in an optimizer's state that is in extra are texts": (
            "moe_ext/distributed/checkpoint.py",
            "new = [-int(text) if numbered and text.isdigit() else text-]{+text+}",
            "tests/distributed/test_resume.py -k extra_comes_back",
        ),
        "a state with fewer parameters is taken": (
            "moe_ext/distributed/training_state.py",
            'if f"{OPTIONS}{name}" not in saved{+ and not held+}:',
            "tests/distributed/test_resume.py -k options_that_do_not_fit",
        ),
        "an option that an optimizer does not know is ignored in a state": (
            "moe_ext/optim/_arguments.py",
            '[-        self._check_groups(state_dict["param_groups"])\n-]',
            "tests/optim/test_options.py",
        ),
        "a step takes written weights of 16 bits back to their masters": (
            "moe_ext/optim/cpu_adamw.py",
            "follow_copy=[-rounded-]{+False+}",
            "tests/optim/test_written_weights.py -k CPUAdamW",
        ),
        "packed weights stay as they were when their experts are written": (
            "moe_ext/compression/packed_experts.py",
            "[-        self._follow()\n-]",
            "tests/optim/test_written_weights.py -k modules",
        ),
        "moments of a stage's layers are those of another stage's in a checkpoint": (
            "moe_ext/distributed/training_state.py",
            "state[f\"{_STATE}{key}.{name{+.replace('2', '0')+}}\"] = whole_of",
            "tests/pipeline/test_stages.py -k loaded_by_another_number",
        ),
        "counts of steps begin anew in stages that load a checkpoint": (
            "moe_ext/distributed/training_state.py",
            'key: {+value.zero_() if key == "step" else +}_local(value, place, parameter) if '
            "isinstance",
            "tests/pipeline/test_stages.py -k loaded_by_another_number",
        ),
        "a router multiplies what padding holds": (
            "moe_ext/nn/routers/base.py",
            "[-x_TD = without_bad_padding(x_TD, token_mask)-]{+pass+}",
            "tests/test_bad_numbers.py -k may_hold_anything",
        ),
        "a shared expert multiplies NaN of padding": (
            "moe_ext/nn/feed_forward.py",
            "[-token_mask[..., None] | x.isfinite-]{+x.isfinite() | x.isnan+}()",
            "tests/test_bad_numbers.py -k may_hold_anything",
        ),
        "a round that could not begin is never tried again": (
            "moe_ext/optim/local_steps.py",
            "self._local_step [->-]{+=+}= self._steps - self._delay",
            "tests/optim/test_diloco.py -k could_not_begin",
        ),
        "NaN in the mean of a round goes into weights and into what is owed": (
            "moe_ext/optim/local_steps.py",
            "found = [-self._find_nonfinite(fragment, means)-]{+None+}",
            "tests/optim/test_diloco.py -k manager_that_are_not_finite",
        ),
        "gradients of experts over ranks lack the factor of the mean": (
            "moe_ext/dispatch/**/*.py",
            "self.exchange_rows, grad_scale=[-self.grad_scale-]{+1.0+}",
            "tests/dispatch/test_dispatcher.py tests/distributed/test_gradients.py",
        ),
        "weights of rows travel once the rows have come": (
            "moe_ext/dispatch/base.py",
            "meanwhile=[-send_rows-]{+(send_rows(), None)[1]+}",
            "tests/dispatch/test_dispatcher.py -k number_of_collectives",
        ),
        "a step that fails leaves what it wrote": (
            "moe_ext/compression/**/*.py",
            "                self.[-_spare-]{+_kept+}[kind] = working\n",
            "tests/compression/test_feedback.py tests/compression/test_hook_faults.py",
        ),
        "what is owed is not scaled to a new learning rate": (
            "moe_ext/compression/**/*.py",
            "add_at(grad_N, self._kept[kind], start[-, self.factor(kind)-])",
            "tests/compression/test_feedback.py",
        ),
        "factors of PowerSGD are lost at a resume": (
            "moe_ext/compression/feedback.py",
            "for k in self.kinds() if k not in [-ELEMENTWISE-]{+(*ELEMENTWISE, 'powersgd')+}}",
            "tests/distributed/test_resume.py -k beside_the_optimizer",
        ),
        "the documents of a shard are one too far": (
            "moe_ext/attention/**/*.py",
            "torch.unique_consecutive(found[- - 1-], return_counts=True)",
            "tests/attention/test_layouts.py",
        ),
        "a window is one key too narrow where keys are left out": (
            "moe_ext/attention/**/*.py",
            "first_L = torch.maximum(first_L, positions_L - mask.left{+ + 1+})",
            "tests/attention/test_layouts.py tests/attention/test_ring_attention.py",
        ),
        "the mean over tokens forgets the scale of its gradient": (
            "moe_ext/attention/**/*.py",
            "[-scale-]{+1.0+} / sums[1].clamp_min(1.0)",
            "tests/distributed/test_context_parallel.py",
        ),
        "the selection bias moves towards the load": (
            "moe_ext/nn/**/*.py",
            "torch.sign(total_E[-.sum() - total_E * total_E.shape[0]-]"
            "{+ * total_E.shape[0] - total_E.sum()+})",
            "tests/nn/test_selection_bias.py",
        ),
        "injected losses are not scaled": (
            "moe_ext/nn/**/*.py",
            "torch.full((), coef, dtype=dtype, device=device)[- * ctx.scale-]",
            "tests/nn/test_moe_layer.py",
        ),
        "an expert that is a module is taken for one of a stack over ranks": (
            "moe_ext/optim/_sliced.py",
            "[-local_part(parameter) if place is not None and place.dim is None else -]parameter",
            "tests/optim/test_muon_over_ranks.py -k experts_over_ranks",
        ),
        "the trust ratio of LAMB is upside down": (
            "moe_ext/optim/**/*.py",
            "([-weight_G / update_G-]{+update_G / weight_G+})",
            "tests/optim/test_dense_optimizers.py",
        ),
        "1-bit Adam compresses a step late": (
            "moe_ext/optim/**/*.py",
            "return self.steps_taken <{+=+} self.freeze_step",
            "tests/optim/test_one_bit_optimizers.py tests/optim/test_one_bit_over_ranks.py",
        ),
        "the norm counts experts that several ranks hold once too seldom": (
            "moe_ext/distributed/**/*.py",
            "part [-* num_parts -]/ stage_size",
            "tests/distributed/test_gradients.py",
        ),
        "maps of stretches are put together in the wrong order": (
            "moe_ext/attention/recurrent/scan.py",
            "found = come if found is None else self._after([-found, come-]{+come, found+})",
            "tests/attention/test_recurrent_over_ranks.py -k 'a_recurrence and delta'",
        ),
        "a document of the rank before goes on where another begins": (
            "moe_ext/attention/recurrent/functional.py",
            "return found[- if goes_on is None else found * goes_on-], last",
            "tests/attention/test_recurrent_over_ranks.py -k 'a_recurrence and linear'",
        ),
        "a row that two ranks read has the gradient of the last": (
            "moe_ext/attention/recurrent/moves.py",
            "rows.[-index_add_-]{+index_copy_+}(2, ",
            "tests/attention/test_recurrent_over_ranks.py -k 'a_recurrence and heads'",
        ),
        "a convolution reads across documents": (
            "moe_ext/attention/recurrent/local.py",
            "same = ([-documents[:, tap : tap + length]-]{+own+} == own).unsqueeze(1)",
            "tests/attention/test_recurrent.py -k convolution",
        ),
        "a chunk of a recurrence lets documents see each other": (
            "moe_ext/attention/recurrent/local.py",
            "lower = lower & (ids.unsqueeze(-1) [-== ids.unsqueeze(-2)-]{+>= 0+})",
            "tests/attention/test_recurrent.py -k formula",
        ),
        "a decay by element ends one position early": (
            "moe_ext/attention/recurrent/local.py",
            "return F.pad(steps[..., [-1:-]{+:-1+}, :], (0, 0, 0, 1)).flip",
            "tests/attention/test_recurrent.py -k formula",
        ),
        "lightning attention gives heads the decays of others": (
            "moe_ext/attention/huggingface/mixers.py",
            "g = -module.slope_rate.view(heads, 1){+.flip(0)+}",
            "tests/integrations/huggingface/test_hybrid_models.py -k "
            "some_equal_one_process-minimax",
        ),
        "tied weights keep the gradient of their own stage alone": (
            "moe_ext/pipeline/**/*.py",
            "return [-torch.stack([found[rank] for rank in ranks]).sum(0)-]"
            "{+found[self.rank]+}, sent",
            "tests/pipeline/test_stages.py",
        ),
        "the norm counts a copy of a stage's weights again": (
            "moe_ext/distributed/**/*.py",
            "_copies.update(dict.fromkeys([-copies-]{+()+}, True))",
            "tests/pipeline/test_stages.py",
        ),
        "an overflow of another stage is not seen": (
            "moe_ext/distributed/**/*.py",
            "over |= dict.fromkeys(_pipelines[p] for p in held if p in [-_pipelines-]{+()+})",
            "tests/pipeline/test_stages.py",
        ),
        "a step ends before what it sent has come": (
            "moe_ext/pipeline/**/*.py",
            "for message in run.sent:\n            [-message.wait()-]{+break+}",
            "tests/pipeline/test_stages.py",
        ),
        "a failure does not say in which action it was": (
            "moe_ext/pipeline/**/*.py",
            "name = [-self.messages.named(action)-]{+'a step'+}\n            # Python",
            "tests/pipeline/test_stages.py tests/pipeline/test_executor.py",
        ),
        "a stage's second forward pass draws other numbers": (
            "moe_ext/nn/torch_state.py",
            "[-torch.set_rng_state(self.generator)-]{+pass+}\n            if",
            "tests/pipeline/test_executor.py",
        ),
        "a stage reads what comes over NCCL before its event": (
            "moe_ext/comm/point_to_point.py",
            "return Pending.[-of_works([work], lambda: x, self._group, operation-]{+done(x+})",
            "tests/pipeline/test_ordered_messages.py",
        ),
        "a pipeline on CUDA does not hear of an error behind its first step": (
            "moe_ext/pipeline/executor.py",
            "            [-look(self._group)-]{+pass+}\n",
            "tests/pipeline/test_ordered_messages.py -k next_step",
        ),
        "an error between exchanges on CUDA is not kept for those who miss the rank": (
            "moe_ext/comm/reports.py",
            "            [-tell_own_error(with_layer(self.operation), error)-]{+pass+}\n",
            "tests/comm/test_reports.py -k on_a_device",
        ),
        "a kernel on tensor cores looks for the memory of its operands": (
            "tools/kernel_sass.py",
            "return [-self.count(PRODUCTS) > 0 and self.count(GENERIC) > 0-]{+False+}",
            "tests/test_kernel_sass.py",
        ),
        "nothing holds the memory of what NCCL sends": (
            "moe_ext/comm/point_to_point.py",
            "[work], [-lambda: x-]{+(lambda: x) if pair[1] == self._rank else list+}, self",
            "tests/pipeline/test_ordered_messages.py",
        ),
        "both ways between two ranks go over one communicator of NCCL": (
            "moe_ext/comm/point_to_point.py",
            "self._of_pair[pair] = {+self._of_pair.get(pair[::-1]) or +}c10d",
            "tests/pipeline/test_ordered_messages.py",
        ),
        "actions take turns in threads, where streams wait": (
            "moe_ext/pipeline/executor.py",
            "if setup.in_turns[- and not self._in_order-]:",
            "tests/pipeline/test_ordered_messages.py",
        ),
        "a rank receives in another order than the other one sends": (
            "moe_ext/pipeline/check.py",
            "if [-sent != taken-]{+(sent is None) != (taken is None)+}:",
            "tests/pipeline/test_check.py -k orders",
        ),
        "weight stashing takes the newest weights": (
            "moe_ext/pipeline/**/*.py",
            "p.data[-.clone() if outlives else p.data-]",
            "tests/pipeline/test_asynchronous.py",
        ),
        "a send stands in front of what it sends": (
            "moe_ext/pipeline/**/*.py",
            "rows[rank].[-append(-]{+insert(len(rows[rank]) - 1, +}span.action)\n        for part",
            "tests/pipeline/test_check.py",
        ),
        "gpu-check builds without what an install builds": (
            "setup.py",
            "for name in [-libraries()-]{+['_C', '_C_cuda']+}:\n        put(",
            "tests/test_gpu_check.py -k builds_what",
        ),
        "a launch wraps a number of blocks to 32 bits": (
            "csrc/**/*.cuh",
            "Dim3 grid([-in.batch * in.heads-]"
            "{+static_cast<unsigned>(in.batch * in.heads)+}, in.tiles())",
            "tests/test_kernel_sources.py",
        ),
        "gpu-tune names the slowest": (
            "tools/gpu_check.py",
            'sorted(entries, key=lambda row: {+-+}row["us"])',
            "tests/test_gpu_check.py -k alternatives",
        ),
        "gpu-check measures the layer before it has run each operator": (
            "tools/gpu_check.py",
            'yield "{+first", lambda: figure_steps(FIRST_FIGURES)\n    yield "+}operators", alone(',
            "tests/test_gpu_check.py -k plan_goes",
        ),
        "a loop over elements counts in 32 bits": (
            "csrc/**/*.cuh",
            "for ([-int64_t i = (int64_t{blockIdx.x}-]"
            "{+int i = (blockIdx.x+} * kThreads + threadIdx.x) * 8; i <",
            "tests/test_kernel_sources.py",
        ),
        "gpu-check builds with options that an install does not have": (
            "tools/gpu_check.py",
            '[-"MOE_EXT_WERROR": "0",-]',
            "tests/test_gpu_check.py -k builds_what",
        ),
        "bits that differ are applied twice where weights are tied": (
            "moe_ext/sync/receiver.py",
            "return [[-names for names in groups if len(names) > 1-]]",
            "tests/sync/test_delta_sync.py -k memory_and_sources_in_common",
        ),
        "a tensor that two sources hold is applied twice": (
            "moe_ext/sync/update.py",
            "entries.setdefault((entry.name, entry.region{+, number+}), (number, entry))",
            "tests/sync/test_delta_sync.py -k memory_and_sources_in_common",
        ),
        "a receiver writes to tensors that its module has replaced": (
            "moe_ext/sync/receiver.py",
            "if now [-!= self._places.get(name)-]{+is None+}:",
            "tests/sync/test_delta_sync.py -k were_replaced",
        ),
        "damage in a file of patches is not seen": (
            "moe_ext/sync/formats.py",
            'if (crc := f"{_checksum(text, [-tensors):08x}") !-]{+{}):08x}") =+}= want:',
            "tests/sync/test_delta_sync.py -k find_damage",
        ),
        "receivers write an update that one of them refuses": (
            "moe_ext/sync/exchange.py",
            "[-write = end.prepare(update-]{+(write := end.prepare(update))(+})",
            "tests/sync/test_sync_over_ranks.py",
        ),
        "Horovod's step with a closure takes each rank's own gradients": (
            "moe_ext/integrations/horovod.py",
            "self._step([-lambda: self._averaged(closure)-]{+closure+})",
            "tests/integrations/test_horovod.py -k loops",
        ),
        "Horovod's gradients of a step after one that was left out stay those of each rank": (
            "moe_ext/integrations/horovod.py",
            "def _accumulated(self, _: object) -> None:\n"
            "        [-self._synchronized = False-]{+pass+}",
            "tests/integrations/test_horovod.py -k loops",
        ),
        "Horovod's average=False by position is taken for the name": (
            "moe_ext/integrations/horovod.py",
            "op = [-Sum if average is False else -]Average",
            "tests/integrations/test_horovod.py -k documented_calls",
        ),
        "manual_backward of Lightning leaves gradients of experts as they are on each rank": (
            "moe_ext/integrations/lightning.py",
            "if [-is_manual-]{+False+} and isinstance(",
            "tests/distributed/test_lightning.py -k manual",
        ),
        "a checkpoint of Lightning that rank 0 could not write is none of the others' business": (
            "moe_ext/integrations/lightning.py",
            "        [-save(*args, **options)-]{+try:\n            save(*args, **options)\n"
            "        except Exception:\n            pass+}\n        agreement",
            "tests/distributed/test_lightning.py -k averaged_weights",
        ),
        "Fabric loads the moments of all experts into those of a rank": (
            "moe_ext/integrations/lightning.py",
            "        with whole_state_dicts([-*_optimizers(state)-]):\n            return",
            "tests/distributed/test_lightning.py -k saves_for_all",
        ),
        "torchft's first step takes gradients that ranks have averaged": (
            "moe_ext/integrations/torchft.py",
            "if [-synced and share != 1.0-]{+False+}:",
            "tests/integrations/test_torchft.py -k first_quorum",
        ),
        "a rank that heals keeps a gradient that no group has": (
            "moe_ext/integrations/torchft.py",
            "            [-parameter.grad = None-]{+pass+}\n        elif synced",
            "tests/integrations/test_torchft.py -k first_quorum",
        ),
        "DeepSpeed's layer takes drop_tokens and does not use it": (
            "moe_ext/integrations/deepspeed.py",
            "if [-not self.drop_tokens-]{+False+}:",
            "tests/integrations/test_facades.py",
        ),
    },
    "_runtime": {
        "a backward pass leaves tangents of its gradients out": (
            "csrc/runtime/autograd.cpp",
            "[-    for (const Tensor& grad : grads) {\n      refuse_tangent(formula, grad);\n"
            "    }\n-]",
            "tests/ops/test_second_derivatives.py",
        ),
        "gradients of gradients by torch.func leave terms out": (
            "csrc/runtime/autograd.cpp",
            '(transforms.attr("count")("grad").cast<int>() < [-2-]{+3+})',
            "tests/ops/test_second_derivatives.py",
        ),
        "ranks that share memory get the rows of the first of them": (
            "csrc/runtime/shared_memory.cpp",
            "to += [-is_same ? 0 : round_up(bytes[rank], kLine)-]{+0+};",
            "tests/comm/test_shared_memory.py -k whom_they_are_for",
        ),
        "a rank writes over what others have not read": (
            "csrc/runtime/shared_memory.cpp",
            "      begin = [-to-]{+begin+};",
            "tests/comm/test_shared_memory.py -k any_order",
        ),
        "rows that nobody waits for keep their memory": (
            "csrc/runtime/shared_memory.cpp",
            "[-exchanges_->abandon(each.from, number_);-]{+(void)each;+}",
            "tests/comm/test_shared_memory.py -k given_back",
        ),
        "a rank keeps all memory that it has shared": (
            "csrc/runtime/shared_memory.cpp",
            "if (underway_.empty() && used_ > [-kKeptBytes-]{+own().data_bytes()+}) {",
            "tests/comm/test_shared_memory.py -k given_back",
        ),
        "a killed rank is waited for": (
            "csrc/runtime/shared_memory.cpp",
            "return region(rank).header().closed.load() != 0[- || !region(rank).is_owned()-];",
            "tests/comm/test_shared_memory.py -k killed",
        ),
        "a fork closes the memory of its parent": (
            "csrc/runtime/shared_memory.cpp",
            "if (is_made_[- && getpid() == process_-]) {",
            "tests/comm/test_shared_memory.py -k fork",
        ),
        "a compiled exchange accepts a rank past the last": (
            "csrc/runtime/*.cpp",
            "require(0 <= rank && rank <{+=+} size,",
            "tests/comm/test_ring_exchange.py",
        ),
    },
    "_C": {
        "an expert takes one row more than its capacity": (
            "csrc/**/*_cpu.cpp",
            "slots.out[slot] = e >= 0 && room[e] >{+=+} 0 ? e : -1;",
            "tests/ops/test_capacity.py",
        ),
        "a chunk of the delta rule ends behind the first position of a document": (
            "csrc/**/chunks.h",
            "end = i{+ + 1+};",
            "tests/ops/test_recurrence.py",
        ),
        "the delta rule takes nothing away from the gradient of a state": (
            "csrc/**/*_cpu.cpp",
            "part.values(scratch.more_values).view(), 1, [--1-]{+0+});",
            "tests/ops/test_recurrence.py",
        ),
        "of equal weights the higher slot keeps its row": (
            "csrc/**/*_cpu.cpp",
            "weights[a] > weights[b] || (weights[a] == weights[b] && a [-<-]{+>+} b)",
            "tests/ops/test_permutation.py",
        ),
        "all experts add the bias of the first": (
            "csrc/**/*_cpu.cpp",
            "rows_of(*bias, [-tile.expert, tile.expert +-]{+0,+} 1)",
            "tests/ops/test_grouped_gemm.py",
        ),
        "a sum of pairs is not divided": (
            "csrc/**/*_cpu.cpp",
            "const float by = [-static_cast<float>(divisor)-]{+divisor < 0 ? -1.0f : 1.0f+};\n"
            "  for_each_chunk",
            "tests/ops/test_pairs.py",
        ),
        "selection does not scale what is owed": (
            "csrc/**/*_cpu.cpp",
            "momentum, [-residual_scale-]{+0 * residual_scale + 1+}};\n"
            "  const Scopes scopes = check_topk_compress",
            "tests/ops/test_topk.py",
        ),
        "pieces of a tensor draw the same random numbers": (
            "csrc/**/*_cpu.cpp",
            "{data_or_null<int64_t>(state), nullptr},\n        [-element_offset-]{+0+}};",
            "tests/ops/test_quantize.py",
        ),
    },
    "_C_simt": {
        "a kernel counts before its bins are cleared": (
            "csrc/**/*.cuh",
            "    bins[bin] = 0;\n  }\n  [-__syncthreads();\n  -]fill(bins);",
            "tests/ops/test_topk.py -k simt",
        ),
        "a kernel adds up half of a row's lanes": (
            "csrc/**/*.cuh",
            "for (int offset = step / [-8-]{+16+}; offset > 0; offset /= 2)",
            "tests/ops/test_attention_merge.py -k simt",
        ),
        "a chunk of a kernel goes on with the state of another document": (
            "csrc/**/*.cuh",
            "const bool kept = !begins[- && !chunk.has_start-];\n  const Acc through",
            "tests/ops/test_recurrence.py -k simt",
        ),
        "a kernel of scans hands a gradient on to the document before": (
            "csrc/**/*.cuh",
            "of_state[i] = fresh ? [-Acc(0)-]{+grad+} : grad * decay;",
            "tests/ops/test_recurrence.py -k simt",
        ),
        "a kernel gives a position no gradient of the last tap": (
            "csrc/**/*.cuh",
            "ahead {++ 1 +}< in.width && from + ahead < in.length",
            "tests/ops/test_recurrence.py -k simt",
        ),
        "a kernel of quantisation subtracts what is owed": (
            "csrc/**/*.cuh",
            "a.v[j] = [-residual.v[j] + a-]{+a.v[j] - residual+}.v[j];",
            "tests/ops/test_quantize.py -k simt",
        ),
        "products on tensor cores leave out what 16 bits of a weight do not hold": (
            "csrc/**/*.cuh",
            "if constexpr ([-kLowPart-]{+false+}) {",
            "tests/ops/test_attention.py -k simt",
        ),
        "gradients at an odd place of their buffer are stored in pairs": (
            "csrc/**/*.cuh",
            "[- && is_aligned(place, 2 * sizeof(T))-];",
            "tests/ops/test_addresses.py -k simt",
        ),
        "a tile of keys or values comes while other warps still read the one before": (
            "csrc/**/*.cuh",
            "  [-wait_copies<0>();\n  __syncthreads();\n  -]if (next >= 0) {",
            "tests/ops/test_attention.py -k simt",
        ),
        "keys or values that come ahead are not waited for": (
            "csrc/**/*.cuh",
            "  wait_copies<[-1-]{+2+}>();\n  __syncthreads();",
            "tests/ops/test_attention.py -k simt",
        ),
        "rows are found by a product of 32 bits": (
            "csrc/**/*.cuh",
            "const T* place = from + [-row * stride-]{+static_cast<int>(row * stride)+} + col;",
            "tests/ops/test_addresses.py -k 'simt and far'",
        ),
        "a store that names global memory goes to shared memory": (
            "csrc/**/*.cuh",
            "[-store_shared-]{+store+}(own +",
            "tests/ops/test_quantize.py -k simt",
        ),
    },
}
MUTANTS = [
    Mutant(name, *mistake, library)
    for library, mistakes in MISTAKES.items()
    for name, mistake in mistakes.items()
]
MUTANTS += [Mutant(name, *mistake) for of in BY_SYSTEM.values() for name, mistake in of.items()]


def copy_tree(target):
    """The files that git knows, and the built libraries."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    libraries = [*(ROOT / "moe_ext").glob("*.so"), *(ROOT / "build").glob("_C_*.so")]
    found = [ROOT / name for name in names.stdout.split("\n") if name] + libraries
    for path in found:
        if path.is_file():
            to = target / path.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)


def place_of(tree, mutant):
    """The one file that holds the text once, or why the breakage cannot be made there."""
    found = []
    for path in sorted(tree.glob(mutant.files)):
        found += [path] * path.read_text().count(mutant.old)
    if len(found) != 1:
        return f"its text is there {len(found)} times"
    if found[0].suffix == ".py":
        try:
            ast.parse(found[0].read_text().replace(mutant.old, mutant.new))
        except SyntaxError as error:
            return f"it is no Python: {error}"
    return found[0]


def _ninja(build, *arguments):
    done = subprocess.run(
        ["ninja", "-C", str(build), *arguments], capture_output=True, text=True, check=True
    )
    return [line for line in done.stdout.splitlines() if not line.startswith("ninja: ")]


def _objects_with(build, source):
    """Objects that a source file goes into."""
    found, current = set(), ""
    for line in _ninja(build, "-t", "deps"):
        if not line.startswith(" "):
            current = line.partition(":")[0]
        # ccache may name it from the build folder on.
        elif os.path.normpath(build / line.strip()) == source:
            found.add(current)
    return found


def rebuild(tree, build, source, library):
    """Makes a library of the scratch tree with the changed source in it.

    Returns:
        Why it could not be made, or None.
    """
    cache = (build / "CMakeCache.txt").read_text()
    home = re.search(r"CMAKE_HOME_DIRECTORY:INTERNAL=(.*)", cache).group(1)
    needed = _objects_with(build, f"{home}/{source.relative_to(tree)}")
    try:
        *compiles, link = _ninja(build, "-t", "commands", LIBRARIES[library])
    except subprocess.CalledProcessError:
        return f"{build} does not make {library}: MOE_EXT_TESTS=1 make build"
    made = tree / "build" / "objects"
    shutil.rmtree(made, ignore_errors=True)
    chosen = []
    for command in compiles:
        output = re.search(r" -o (\S+\.o) ", command).group(1)
        (made / output).parent.mkdir(parents=True, exist_ok=True)
        if output in needed:
            # Files that are compiled together stand in a file of includes in the build folder.
            for together in re.findall(r"\S+/Unity/\S+\.cxx", command.partition(" -c ")[2]):
                includes = (made / output).with_suffix(".cxx")
                includes.write_text((build / together).read_text().replace(f"{home}/", f"{tree}/"))
                command = command.replace(f"-c {together}", f"-c {includes}")
            for folder in ("csrc", "tests"):
                command = command.replace(f"{home}/{folder}", f"{tree}/{folder}")
            chosen.append(command)
        else:
            (made / output).symlink_to(build / output)
    if not chosen:
        return "no object of the library includes it"

    def run(command):
        return subprocess.run(command, shell=True, cwd=made, capture_output=True, text=True)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        failed = [done.stderr for done in pool.map(run, chosen) if done.returncode]
    if failed:
        return "does not compile: " + failed[0][-300:]
    done = run(re.sub(r" -o \S+ ", " -o made.so ", link))
    if done.returncode:
        return "does not link: " + done.stderr[-300:]
    shutil.copy2(made / "made.so", library_of(tree, library))
    return None


def library_of(tree, library):
    """Where a tree has it."""
    if library == "_C_simt":
        return tree / "build" / "_C_simt.so"
    return next((tree / "moe_ext").glob(f"{library}.*so"))


def pytest_in(tree, tests, timeout):
    """Exit status and last line of the tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *shlex.split(tests)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return 1, f"still ran after {timeout} s"
    lines = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (failed or lines)[-1]


def outcome(mutant, tree, build, timeout):
    """(what became of it, why)."""
    place = place_of(tree, mutant)
    if isinstance(place, str):
        return "stale", place
    text = place.read_text()
    library = None if mutant.library is None else library_of(tree, mutant.library)
    kept = None if library is None else library.read_bytes()
    place.write_text(text.replace(mutant.old, mutant.new))
    try:
        if mutant.library is not None:
            problem = rebuild(tree, build, place, mutant.library)
            if problem is not None:
                return "stale", problem
        status, last = pytest_in(tree, mutant.tests, timeout)
    finally:
        place.write_text(text)
        if library is not None:
            library.unlink(missing_ok=True)
            library.write_bytes(kept)
    if status < 0:
        return "caught", f"ended by signal {-status}"
    # 2 to 5: interrupted, an error of use or of pytest itself, no tests.
    return {0: "missed", 1: "caught"}.get(status, "stale"), last


def default_build():
    import torch

    return ROOT / "build" / f"cmake-{torch.__version__}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--python", action="store_true", help="those that need no compiler")
    parser.add_argument("--build", type=Path, help="build folder (default: that of `make build`)")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for the tests of one")
    parser.add_argument("--baseline", action="store_true", help="run all their tests unchanged")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if re.search(arguments.only, m.name)]
    if arguments.python:
        chosen = [m for m in chosen if m.library is None]
    counts = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        if arguments.baseline:
            for tests in dict.fromkeys(m.tests for m in chosen):
                status, last = pytest_in(tree, tests, arguments.timeout)
                print(f"{'passed' if status == 0 else 'FAILED'}  {tests}: {last}", flush=True)
                counts["fails unchanged"] += status != 0
        for mutant in chosen:
            start = time.monotonic()
            found, why = outcome(
                mutant, tree, arguments.build or default_build(), arguments.timeout
            )
            counts[found] += 1
            seconds = f"{time.monotonic() - start:4.0f} s"
            print(f"{found:7} {seconds}  {mutant.name}\n{'':16}{why[:160]}", flush=True)
    print(", ".join(f"{count} {found}" for found, count in counts.items() if count))
    return int(any(count for found, count in counts.items() if found != "caught"))


def wrong_places(chosen):
    """Mutants whose text or tests are not there: a line for each."""
    found = []
    for mutant in chosen:
        place = place_of(ROOT, mutant)
        files = [name for name in mutant.tests.split() if name.startswith("tests/")]
        absent = [name for name in files if not (ROOT / name.partition("::")[0]).exists()]
        if isinstance(place, str) or absent:
            found.append(f"{mutant.name}: {place if isinstance(place, str) else ''} {absent or ''}")
    return found


if __name__ == "__main__":
    sys.exit(main())
