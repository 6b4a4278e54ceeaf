"""Which tests carry the marks `compat`, `serial` and `product`, and which files start first."""

# Marked `compat`, and run under the oldest and the newest torch too: what rests on the binary
# interface, schemas, autograd and compilation of operators, c10d's classes, DTensor, FSDP2.
COMPAT = (
    "tests/ops/test_*.py::test_*opcheck*",
    "tests/ops/test_*.py::test_compiles_*",
    "tests/nn/test_compile.py::*",
    "tests/nn/test_moe_layer.py::test_autocast*",
    "tests/nn/test_moe_layer.py::test_checkpointing_*",
    "tests/nn/test_moe_layer.py::test_deepcopy_*",
    "tests/nn/test_moe_layer.py::test_equals_loops_*",
    "tests/nn/test_moe_layer.py::test_meta_*",
    "tests/distributed/test_data_parallel.py::test_four_ranks*",
    "tests/dispatch/test_dispatcher.py::test_expert_parallel*",
    "tests/distributed/test_fsdp.py::test_another_number_of_ranks_goes_on*",
    "tests/comm/test_ring_exchange.py::test_ranks*",
    "tests/compression/test_ddp_hook.py::test_hook*",
    "tests/compression/test_fsdp_compression.py::test_two_ranks*",
    "tests/optim/test_sharded_optimizers.py::test_sharded*",
    "tests/test_cuda_library.py::*",
    "tests/test_runtime_library.py::*",
)
# These measure time: they run one by one, when nothing else does.
SERIAL = (
    "tests/compression/test_collective_failures.py::test_async_returns_at_once*",
    "tests/compression/test_collective_failures.py::test_other_threads_run_*",
    "tests/compression/test_cost_model.py::test_ranks_agree*",
)

# Cases that look up what one run of all ranks found cost nothing; no death of a rank is left out.
PRODUCT = (
    "tests/ops/test_addresses.py::test_gives_*",
    "tests/*/test_*.py::test_ranks*",
    "tests/*/test_*.py::test_over_ranks*",
    "tests/*/test_*.py::test_a_dead_rank_*",
)
# Files that take longest, dearest first: they start first, so that none is left over at the end.
DEAREST = (
    "tests/examples/test_train_moe_lm.py",
    "tests/planner/test_apply.py",
    "tests/planner/test_plan.py",
    "tests/integrations/huggingface/test_hybrid_models.py",
    "tests/ops/test_addresses.py",
    "tests/attention/test_schemes_over_ranks.py",
    "tests/distributed/test_clipping_matrix.py",
    "tests/test_gpu_check.py",
    "tests/distributed/test_composition.py",
    "tests/integrations/huggingface/test_prepared_models.py",
    "tests/dispatch/test_dedup.py",
    "tests/attention/test_recurrent_over_ranks.py",
    "tests/distributed/test_nothing_replaced.py",
    "tests/ops/test_attention.py",
    "tests/test_expert_parallel_benchmark.py",
    "tests/integrations/huggingface/test_families.py",
    "tests/distributed/test_resume.py",
    "tests/dispatch/test_coded_rows.py",
    "tests/distributed/test_axes.py",
    "tests/test_first_contact.py",
    "tests/planner/test_codecs.py",
    "tests/ops/test_topk.py",
    "tests/nn/test_combinations.py",
    "tests/comm/test_ring_exchange.py",
    "tests/distributed/test_fsdp.py",
    "tests/attention/test_module.py",
    "tests/test_docs_tour.py",
    "tests/ops/test_compression_large.py",
    "tests/compression/test_collectives.py",
    "tests/examples/test_samples.py",
    "tests/ops/test_gating.py",
    "tests/compression/test_nodes.py",
    "tests/pipeline/test_executor.py",
    "tests/ops/test_grouped_gemm.py",
    "tests/test_memory.py",
    "tests/nn/test_compile.py",
    "tests/planner/test_stage_layers.py",
    "tests/test_allreduce_benchmark.py",
)
MARKS = {"compat": COMPAT, "serial": SERIAL, "product": PRODUCT}
