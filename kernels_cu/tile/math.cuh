// Integer helpers of tile arithmetic.
#pragma once
#include "ptx/ptx.cuh"

namespace cf {

CF_DEVICE constexpr int min(int a, int b) { return a < b ? a : b; }
CF_DEVICE constexpr int max(int a, int b) { return a > b ? a : b; }
CF_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace cf
