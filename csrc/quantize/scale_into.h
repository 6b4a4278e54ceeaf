// Scaled copies: the argument checks that both backends share.
#pragma once

#include "common/check.h"

namespace moe_ext::scale_into {

void check_scale_into(const Tensor& out, const Tensor& x);

} // namespace moe_ext::scale_into
