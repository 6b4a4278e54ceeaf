// Registration of a family's schemas.
#pragma once

#include <torch/csrc/stable/library.h>

// Schemas are defined once, by the CPU library. Other libraries compile the same file only for its argument checks.
#if defined(MOE_EXT_CHECKS_ONLY)
#define MOE_EXT_SCHEMAS(m) [[maybe_unused]] static void define_schemas(torch::stable::detail::StableLibrary& m)
#else
#define MOE_EXT_SCHEMAS(m) STABLE_TORCH_LIBRARY_FRAGMENT(moe_ext, m)
#endif
