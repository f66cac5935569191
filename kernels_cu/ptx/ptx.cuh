// What kernels include: one function per instruction, from the device headers under NVRTC and from
// their emulated twins under a host compiler. The only file with a preprocessor branch.
#pragma once
#include "types.cuh"

#ifdef __CUDACC_RTC__

#define CF_DEVICE __device__ __forceinline__
#define CF_NOINLINE __device__ __noinline__
#define CF_UNROLL _Pragma("unroll")
#define CF_NO_UNROLL _Pragma("unroll 1")
#define CF_PARAM(T) const __grid_constant__ T
// NVRTC before 13.5 has no offsetof of any spelling; this one is its front end's own.
#define CF_OFFSETOF(Type, member) __INTADDR__(&(((Type*)0)->member))
// A kernel; its body sees one parameter, `params`. The cluster shape is a launch attribute.
#define CF_KERNEL(name, Params, threads, min_blocks, cluster)               \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) name( \
      CF_PARAM(Params) params)

namespace cf::ptx {
// 80, 90, 100, ...: which instructions exist.
inline constexpr int kArchitecture = __CUDA_ARCH__ / 10;
// Tests build kernels with one barrier taken out (kMutant > 0) on the emulator; never on a device.
inline constexpr int kMutant = 0;
}  // namespace cf::ptx

#include "ptx/common.cuh"
#include "ptx/sm80.cuh"
#if __CUDA_ARCH__ >= 900
#include "ptx/sm90.cuh"
#endif
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_e4m3.cuh"
#endif
#if __CUDA_ARCH__ >= 1000
#include "ptx/sm100.cuh"
#endif
#include "ptx/unrecorded.cuh"

#else
#define CF_OFFSETOF(Type, member) __builtin_offsetof(Type, member)
#include "emulate/ptx.hpp"
#endif
