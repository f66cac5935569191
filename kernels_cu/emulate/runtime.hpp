// What a kernel's host build sees of the emulator: plain declarations and nothing else. Every
// kernel is compiled against this file, so it includes no standard header (compile time is the CI
// cost); the library behind it is built once from the .cpp files of this folder.
#pragma once
#include "types.cuh"

namespace cf::emulate {

// --- who and where ------------------------------------------------------------------------------

// Source position of a wrapper call: the default argument of every wrapper, so it names the
// kernel's own line however many headers lie between.
struct Where {
  const char* file;
  int line;
  static constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// The running CUDA thread; `current` changes at every fiber switch.
struct Identity {
  int32_t tid;       // in the CTA
  int32_t lane;      // tid % 32
  int32_t warp;      // tid / 32
  int32_t cta;       // in the grid
  int32_t cta_rank;  // in the cluster
};
extern Identity* current;
extern int32_t grid_size;

// Shared addresses: bits 0 to 23 are the offset, bits 24 and up the CTA rank in the cluster (the
// shape of hardware's shared::cluster window). Dynamic shared memory starts at kSharedBase.
inline constexpr uint32_t kSharedBase = 1024;
inline constexpr int kSharedRankShift = 24;
inline constexpr uint32_t kSharedOffsetMask = (1u << kSharedRankShift) - 1;

// --- launch --------------------------------------------------------------------------------------

struct KernelInfo {
  const char* name;
  int32_t threads;
  int32_t min_blocks;
  int32_t cluster;
  int32_t architecture;  // 80, 90, 100, ...
  uint64_t params_bytes;
  void (*body)(const void* params);
};

enum class Schedule : int32_t { kEarly = 0, kLate = 1, kRandom = 2, kPct = 3 };

struct Counters {
  uint64_t mma;              // matrix instructions, of any kind
  uint64_t bytes_to_shared;  // asynchronous copies: global to shared memory
  uint64_t bytes_to_global;
  uint64_t switches;         // fiber switches
  uint64_t operations;       // asynchronous operations
  uint64_t bank_conflicts;   // extra wavefronts of ldmatrix and stmatrix
};

enum RaceFlags : int32_t { kRaceShared = 1, kRaceGlobal = 2 };

// Mirrored by cupyflash/emulate.py (ctypes).
struct LaunchRequest {
  const void* params;  // lives for the whole launch, like constant bank parameters
  uint64_t params_bytes;
  uint64_t seed;
  double time_limit;  // seconds of wall clock
  int32_t grid;
  int32_t shared_bytes;
  Schedule schedule;
  int32_t race;           // RaceFlags
  int32_t window;         // clusters resident together
  int32_t change_points;  // of the pct schedule
  char* report;
  uint64_t report_bytes;
  Counters* counters;
};

int launch(const KernelInfo& kernel, const LaunchRequest& request);

// --- ordinary memory -----------------------------------------------------------------------------

void shared_load(void* value, saddr address, int bytes, Where where);
void shared_store(saddr address, const void* value, int bytes, Where where);
void global_load(void* value, const void* address, int bytes, Where where);
void global_store(void* address, const void* value, int bytes, Where where);
void global_load_acquire(void* value, const void* address, int bytes, Where where);
void global_store_release(void* address, const void* value, int bytes, Where where);
void global_fence(Where where);
// Atomic read-modify-write of a 32-bit value; returns the old one.
enum class Atomic { kAddU32, kAddF32, kMaxS32, kExchange };
uint32_t global_atomic(Atomic operation, void* address, uint32_t value, Where where);
uint32_t global_atomic_release(Atomic operation, void* address, uint32_t value, Where where);
uint32_t shared_atomic(Atomic operation, saddr address, uint32_t value, Where where);

// --- warp ----------------------------------------------------------------------------------------

enum class Shuffle { kIndex, kXor, kUp, kDown };
uint32_t shuffle(Shuffle kind, uint32_t value, int operand, Where where);
uint32_t vote_ballot(bool predicate, Where where);
int warp_uniform(int value, Where where);
bool elect_one(Where where);
void warp_sync(uint32_t mask, Where where);
void ldmatrix(uint32_t* registers, int count, bool transposed, saddr address, Where where);
void stmatrix(const uint32_t* registers, int count, bool transposed, saddr address, Where where);

// --- barriers ------------------------------------------------------------------------------------

void barrier_sync(int id, int threads, Where where);  // threads 0: the whole CTA
void barrier_arrive(int id, int threads, Where where);
void cluster_arrive(Where where);
void cluster_wait(Where where);

void mbarrier_init(saddr barrier, int count, Where where);
void mbarrier_invalidate(saddr barrier, Where where);
void mbarrier_fence_init(Where where);
void mbarrier_arrive(saddr barrier, int count, uint32_t expected_bytes, Where where);
void mbarrier_expect_tx(saddr barrier, uint32_t bytes, Where where);
bool mbarrier_try_wait(saddr barrier, uint32_t parity, Where where);
void mbarrier_wait(saddr barrier, uint32_t parity, Where where);
saddr map_to_cta(saddr address, uint32_t rank, Where where);

// --- asynchronous copies -------------------------------------------------------------------------

void fence_proxy_async(Where where);

void cp_async(saddr dst, const void* src, int bytes, int source_bytes, Where where);
void cp_async_commit(Where where);
void cp_async_wait(int pending, Where where);  // pending -1: wait_all
void cp_async_mbarrier_arrive(saddr barrier, bool noinc, Where where);

struct Coordinates {
  int32_t c[5];
};
// cta_mask 0: this CTA only. two_ctas: the .cta_group::2 form (the barrier may be the peer's).
void tma_load(saddr dst, const CUtensorMap* map, saddr barrier, int rank, Coordinates at,
              uint32_t cta_mask, bool two_ctas, Where where);
void tma_store(const CUtensorMap* map, saddr src, int rank, Coordinates at, bool reduce_add,
               Where where);
void tma_prefetch(const CUtensorMap* map, Where where);
void bulk_load(saddr dst, const void* src, uint32_t bytes, saddr barrier, uint32_t cta_mask,
               Where where);
void bulk_store(void* dst, saddr src, uint32_t bytes, bool reduce_add_f32, Where where);
void bulk_copy_to_cta(saddr dst, saddr src, uint32_t bytes, saddr barrier, Where where);
// st.async of a word into another CTA of the cluster, which counts on a barrier there.
void store_async(saddr dst, uint32_t value, saddr barrier, Where where);
void bulk_commit(Where where);
void bulk_wait(int pending, bool read_only, Where where);

// --- matrix products -----------------------------------------------------------------------------

enum class Format : int32_t { kBf16, kF16, kE4m3, kE5m2, kTf32 };
template <class Element>
inline constexpr Format kFormatOf = Format::kBf16;
template <>
inline constexpr Format kFormatOf<f16_t> = Format::kF16;
template <>
inline constexpr Format kFormatOf<e4m3_t> = Format::kE4m3;

void mma_m16n8k16(Format format, float* d, const uint32_t* a, const uint32_t* b, Where where);

struct WgmmaForm {
  int32_t n;
  Format format;
  bool a_in_registers, a_mn_major, b_mn_major;
};
void wgmma(const WgmmaForm& form, float* d, const uint32_t* a_registers, uint64_t a_descriptor,
           uint64_t b_descriptor, bool accumulate, Where where);
void wgmma_fence(Where where);
void wgmma_commit(Where where);
void wgmma_wait(int pending, Where where);

void setmaxnreg(int registers, bool increase, Where where);

// tcgen05. `ctas` is the cta_group, 1 or 2.
void tcgen05_alloc(saddr dst, uint32_t columns, int ctas, Where where);
void tcgen05_dealloc(taddr address, uint32_t columns, int ctas, Where where);
void tcgen05_relinquish(int ctas, Where where);
struct TensorOperands {
  taddr d;
  bool a_in_tmem;
  taddr a_tmem;
  uint64_t a_descriptor, b_descriptor;
  uint32_t instruction_descriptor;
  bool accumulate;
  bool kind_f8f6f4;  // otherwise kind::f16
  int32_t ctas;
};
void tcgen05_mma(const TensorOperands& operands, Where where);
void tcgen05_commit(saddr barrier, int ctas, uint32_t cta_mask, Where where);
// shape: lanes x bits of one repetition, e.g. 32x32b is {32, 32}.
struct TensorShape {
  int32_t lanes, bits;
};
void tcgen05_load(TensorShape shape, int repeat, uint32_t* registers, int count, taddr address,
                  Where where);
void tcgen05_store(TensorShape shape, int repeat, taddr address, const uint32_t* registers,
                   int count, Where where);
void tcgen05_wait_load(Where where);
void tcgen05_wait_store(Where where);
void tcgen05_fence_before(Where where);
void tcgen05_fence_after(Where where);

[[noreturn]] void trap(Where where);
// Fails the launch when the kernel was built for an architecture outside [first, last].
void require_architecture(int first, int last, const char* instruction, Where where);

}  // namespace cf::emulate
