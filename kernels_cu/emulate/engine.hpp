// The emulator's inside: fibers, CTAs and clusters, the scheduler, asynchronous operations, and the
// state that the .cpp files of this folder share. Kernels never include it.
//
// Note [One OS thread]
//   Every CUDA thread is a fiber with its own stack; exactly one runs at a time and changes only
//   inside wrappers. A launch is therefore deterministic for a given schedule and seed, and nothing
//   here needs a lock. Parallelism comes from running several processes.
//
// Note [Asynchronous operations]
//   What hardware does in the background is an Operation. Unordered ones (TMA loads, bulk copies)
//   lie in Machine::unordered; ordered ones (cp.async and bulk stores of a thread, wgmma of a
//   warpgroup, tcgen05 of an issuing thread) in an OrderedQueue. The schedule decides when they
//   run: at issue (early), only when no thread can run or a wait forces them (late), at random
//   points (random, pct).
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "race.hpp"
#include "runtime.hpp"

namespace cf::emulate {

inline constexpr int kWarpSize = 32;
inline constexpr int kWarpgroupSize = 128;
inline constexpr int kNamedBarriers = 16;
inline constexpr int kTensorColumns = 512;
inline constexpr int kTensorLanes = 128;
inline constexpr int kPipesPerCta = 4;  // threads of a CTA that may issue tcgen05 work
inline constexpr int kBulkSlots = 64;

struct Fiber;
struct Cta;
struct Cluster;

// --- operations ----------------------------------------------------------------------------------

// The clock at issue and the agent on whose behalf an operation touches memory.
struct Origin {
  ClockPointer clock;
  Agent agent = 0;
  Tick time = 0;
  Site site = 0;
  Access access() const { return {clock ? clock->data() : nullptr, agent, time, site, false}; }
};

struct Operation {
  uint64_t sequence = 0;  // order of issue
  Cluster* cluster = nullptr;
  Where where{};
  virtual ~Operation() = default;
  // Makes some progress; true when finished.
  virtual bool step() = 0;
  // What leaving it unfinished at the end of the kernel means, or null where that is allowed.
  virtual const char* when_abandoned() const { return nullptr; }
};
using OperationPointer = std::unique_ptr<Operation>;

struct OrderedQueue {
  std::deque<OperationPointer> operations;
  bool listed = false;  // in Machine::queues
};

// --- threads -------------------------------------------------------------------------------------

struct DirtyRange {
  uint32_t offset, bytes;
};

// Registers that a tcgen05.ld will fill, or that a tcgen05.st has taken.
struct TensorTransfer {
  Where where;
  TensorShape shape;
  int repeat, count;
  taddr address;
  uint32_t* registers;           // loads
  std::vector<uint32_t> values;  // stores
  Tick time;
};

// A closed cp.async group: everything of the thread up to here.
struct CopyGroup {
  uint32_t issued;
  Tick time;
};

// A bulk store as its thread knows it: shared memory may be reused after a read wait.
struct BulkRecord {
  uint32_t group;
  bool read_waited;
  Agent agent;
  Tick time;
  Where where;
};

struct Flight;

struct Fiber : Identity {
  void* stack_pointer = nullptr;
  Cta* cta = nullptr;
  bool done = true;
  uint32_t priority = 0;  // pct schedule

  // What the thread does, or waits for: for reports.
  const char* instruction = "";
  Where where{};
  bool parked = false;
  saddr wait_address = 0;
  uint32_t wait_value = 0;
  bool wait_is_mbarrier = false;
  bool polling = false;   // may be woken with "not yet" when nothing else can run
  bool poll_result = false;
  const void* spin_address = nullptr;
  uint64_t spin_value = 0;

  // Race detection.
  Agent agent = 0;        // agent + 1: register-side asynchronous work
  Clock clock;
  uint64_t version = 0;   // changes with `clock`
  bool exposed = false;   // others may know the present time: the next access takes a later one
  ClockPointer snapshot;
  uint64_t snapshot_version = ~0ull;
  Clock tensor_clock;     // clock at the last tcgen05.fence::after_thread_sync
  Tick async_time = 0;    // issued register-side operations
  Tick async_waited = 0;  // of them, covered by a wait

  std::vector<DirtyRange> dirty;  // generic stores not yet fenced to the async proxy

  // cp.async and bulk groups: groups closed so far; operations carry the group they belong to.
  OrderedQueue copies, bulk_stores;
  std::vector<CopyGroup> copy_groups;
  uint32_t copies_issued = 0, copies_waited = 0;
  uint32_t bulk_groups = 0;
  std::vector<BulkRecord> bulk_records;  // stores that no full wait has covered

  // wgmma: instructions issued and groups closed by this thread; its accumulators in flight.
  uint64_t wgmma_issued = 0;
  uint32_t wgmma_groups = 0;
  bool wgmma_fenced = false;
  std::vector<std::pair<float*, Flight*>> flights;
  uint64_t wgmma_version = ~0ull;

  std::vector<TensorTransfer> tensor_loads, tensor_stores;
  int pipe = -1;  // index of the tensor pipe that the thread issues to
  bool cluster_arrived = false;
  uint32_t cluster_generation = 0;  // cluster barriers that the thread has passed
};

// A collective in the making: the first arrivals park, the last performs it for all.
struct Rendezvous {
  int count = 0;
  const char* instruction = nullptr;
  Where where{};
  Fiber* members[kWarpgroupSize] = {};
  void* arguments[kWarpgroupSize] = {};
};

struct Warp {
  Rendezvous all;
  struct Partial {
    uint32_t mask;
    Rendezvous rendezvous;
  };
  std::vector<std::unique_ptr<Partial>> partial;  // warp_sync with fewer than 32 lanes
};

struct WgmmaQueue;

struct NamedBarrier {
  int count = 0, expected = 0;
  uint64_t arrived[1024 / 64] = {};
  std::vector<Fiber*> waiting;
  Clock clock;
};

struct MBarrier {
  uint32_t offset = 0;
  int expected = 0, pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;  // completed phases
  bool live = false;
  bool fenced = false;           // fence_mbarrier_init (or a proxy fence) followed the init
  bool has_copies = false;       // bytes came in this phase
  bool unobserved_copies = false;  // ... in a completed phase that nobody has waited for
  std::vector<Fiber*> waiting;
  Fiber* initialiser = nullptr;
  Tick init_time = 0;
  Site init_site = 0;
  Clock gathered, completed;
};

struct Cta {
  Cluster* cluster = nullptr;
  int index = 0, rank = 0;
  int alive = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<std::shared_ptr<WgmmaQueue>> warpgroups;
  NamedBarrier named[kNamedBarriers];

  // Two views of shared memory: ordinary accesses see `generic`, TMA and the tensor cores `async`.
  std::vector<uint8_t> generic, async;
  std::vector<uint16_t> barrier_at;  // by offset / 8: index into `mbarriers` plus one
  std::vector<std::unique_ptr<MBarrier>> mbarriers;
  int num_mbarriers = 0;
  SharedShadow shared_shadow;

  // Tensor memory: [128 lanes][512 columns], made when first allocated.
  std::vector<uint32_t> tensor;
  std::vector<uint8_t> column_taken;
  bool may_allocate = true;
  TensorShadow tensor_shadow;
  OrderedQueue pipes[kPipesPerCta];
  Tick pipe_time[kPipesPerCta] = {};
  Fiber* pipe_owner[kPipesPerCta] = {};

  // setmaxnreg: registers of the pool that no warpgroup holds.
  int registers_free = 0;
  std::vector<int> warpgroup_registers;
  std::vector<Rendezvous> warpgroup_meetings;
  std::vector<Fiber*> waiting_for_registers;
};

struct ClusterBarrier {
  int count = 0;
  uint32_t generation = 0;  // completed ones
  std::vector<Fiber*> waiting;
  Clock gathered, completed;
};

struct Cluster {
  int slot = 0;
  int alive = 0;
  bool resident = false;
  std::vector<std::unique_ptr<Cta>> ctas;
  ClusterBarrier barrier;
};

// --- the machine ---------------------------------------------------------------------------------

struct Machine {
  const KernelInfo* kernel = nullptr;
  const LaunchRequest* request = nullptr;
  Schedule schedule = Schedule::kEarly;
  bool race = false, race_global = false;
  int threads = 0, cluster_size = 0;
  uint64_t random_state = 1;
  Counters counters{};
  uint64_t calls = 0;     // wrapper calls: what the watchdog looks at
  uint64_t progress = 0;  // events that could end a spin
  uint64_t sequence = 0;
  double deadline = 0;

  Fiber* running = nullptr;
  Operation* acting = nullptr;  // the operation being executed, if any
  void* main_stack_pointer = nullptr;
  bool on_fiber = false;
  bool failed = false;
  bool failing_as_a_whole = false;  // no single thread is to blame
  void* fault_at = nullptr;         // the instruction of a fault
  std::string report;
  Cluster* retired = nullptr;

  std::vector<Fiber*> ready;  // ring: [head, size)
  size_t ready_head = 0;
  std::vector<Fiber*> pollers;
  uint64_t polled_at_progress = ~0ull;
  int fruitless_polls = 0;
  std::vector<uint64_t> change_points;  // pct: switch counts at which a priority drops
  uint32_t lowest_priority = 0;

  std::vector<OperationPointer> unordered;
  std::vector<OrderedQueue*> queues;

  std::vector<std::unique_ptr<Cluster>> slots;
  int next_cluster = 0, num_clusters = 0, alive_clusters = 0;

  // Race detection.
  Agent num_agents = 0, agents_per_cluster = 0, first_bulk_agent = 0;
  std::vector<Tick> bulk_time;
  std::vector<Agent> bulk_issuer;  // of the last copy in each slot
  uint32_t next_bulk_slot = 0;
  SiteTable sites;
  RaceLog races;
  GlobalShadow global_shadow;
  std::map<const void*, Clock> released;  // by global address: what release stores left there

  bool early() const { return schedule == Schedule::kEarly; }
  bool random() const { return schedule >= Schedule::kRandom; }
  uint64_t next_random() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
  }
  bool chance(uint32_t one_in) { return next_random() % one_in == 0; }
};
extern Machine machine;

// Ends the launch with a report that names kernel, schedule, seed, thread and source position.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Thrown by fail() when no fiber runs; from a fiber it leaves for the launch's own stack instead.
struct Failure : std::exception {};
[[noreturn]] void leave_fiber();

std::string format_text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string describe_agent(Agent agent);
std::string describe(Where where);
std::string describe_races();
std::string waiting_table();  // who waits where

inline Fiber& self() { return *machine.running; }

// Every wrapper begins here.
inline Fiber& enter(const char* instruction, Where where) {
  Fiber& fiber = *machine.running;
  ++machine.calls;
  fiber.instruction = instruction;
  fiber.where = where;
  return fiber;
}

void make_ready(Fiber* fiber);
void park();          // until another fiber calls make_ready
void yield();
void maybe_yield();   // random schedules: preempt here now and then

// --- operations ----------------------------------------------------------------------------------

// Lets the operation make some progress; true when it has finished.
bool advance(Operation& operation);
// Runs the operation now (early) or leaves it to the schedule.
void issue_unordered(OperationPointer operation, Where where);
void issue_ordered(OrderedQueue& queue, OperationPointer operation, Where where);
void run_front(OrderedQueue& queue);  // to its end
bool run_some_operation();            // false when none is pending

// --- collectives ---------------------------------------------------------------------------------

[[noreturn]] void report_divergence(const Rendezvous& rendezvous, const char* instruction,
                                    Where where);

// Joins `expected` fibers; `perform(arguments)` runs once, on the last arrival. `slot` is this
// fiber's place in `arguments` and `members`.
template <class Perform>
void rendezvous(Rendezvous& meeting, int expected, int slot, const char* instruction, Where where,
                void* argument, Perform&& perform) {
  Fiber& fiber = enter(instruction, where);
  if (meeting.count == 0) {
    meeting.instruction = instruction;
    meeting.where = where;
  } else if (meeting.instruction != instruction || meeting.where.line != where.line) {
    report_divergence(meeting, instruction, where);
  }
  meeting.arguments[slot] = argument;
  meeting.members[slot] = &fiber;
  if (++meeting.count < expected) {
    park();
    return;
  }
  meeting.count = 0;
  perform(meeting.arguments);
  for (Fiber*& member : meeting.members) {
    if (member != nullptr && member != &fiber) make_ready(member);
    member = nullptr;
  }
  maybe_yield();
}

template <class Perform>
void warp_rendezvous(const char* instruction, Where where, void* argument, Perform&& perform) {
  Fiber& fiber = self();
  rendezvous(fiber.cta->warps[fiber.warp].all, kWarpSize, fiber.lane, instruction, where, argument,
             std::forward<Perform>(perform));
}

// --- clocks --------------------------------------------------------------------------------------

inline Access thread_access(Fiber& fiber, Where where) {
  if (fiber.exposed) {
    fiber.exposed = false;
    ++fiber.clock[fiber.agent];
    ++fiber.version;
  }
  return {fiber.clock.data(), fiber.agent, fiber.clock[fiber.agent], machine.sites.intern(where),
          true};
}
inline void learn(Fiber& fiber, const Clock& clock) {
  join(fiber.clock, clock);
  ++fiber.version;
}
inline void learn(Fiber& fiber, Agent agent, Tick time) {
  fiber.clock[agent] = std::max(fiber.clock[agent], time);
  ++fiber.version;
}
// Publishes what the thread knows into `into`; what the thread does next is not covered.
inline void publish(Fiber& fiber, Clock& into) {
  join(into, fiber.clock);
  fiber.exposed = true;
}
// An immutable copy of the thread's clock at an issue; later accesses of the thread are not in it.
ClockPointer snapshot(Fiber& fiber);
// The next recycled slot, for one bulk operation.
Origin bulk_origin(Fiber& fiber, Where where);

// --- shared memory -------------------------------------------------------------------------------

// Of the acting operation's cluster, else the thread's; fails for a bad rank or an exited CTA.
Cta& cta_of(saddr address);
// Offset of [address, address + bytes) in the CTA's dynamic shared memory; checks bounds.
uint32_t shared_offset(const Cta& cta, saddr address, uint32_t bytes);
void check_alignment(saddr address, uint32_t alignment, const char* what);
void check_not_barrier(const Cta& cta, uint32_t offset, uint32_t bytes);

// Ordinary (generic proxy) store of `fiber`, later than its check; marks the range dirty.
void generic_store(Fiber& fiber, Cta& cta, uint32_t offset, const void* value, uint32_t bytes);
inline void observe_shared(Cta& cta, uint32_t offset, uint32_t bytes, bool write,
                           const Access& access) {
  cta.shared_shadow.observe(offset, bytes, write, access, machine.races);
}

// --- mbarriers, seen from operations -------------------------------------------------------------

MBarrier& mbarrier_at(saddr address, const char* what);
// Bytes arrived (or an arrival was made) on behalf of an operation.
void mbarrier_complete_bytes(saddr address, uint32_t bytes, const Origin& origin);
void mbarrier_complete_arrival(saddr address, const Origin& origin);

// --- life cycle hooks of the other files ---------------------------------------------------------

std::shared_ptr<WgmmaQueue> make_wgmma_queue(Cta& cta, int index);
void reset_wgmma_queue(WgmmaQueue& queue);
void check_thread_exit(Fiber& fiber);
void check_wgmma_exit(Fiber& fiber);
void check_tensor_exit(Cta& cta);
Agent warpgroup_agent(const Cta& cta, int warpgroup);
Agent pipe_agent(const Cta& cta, int pipe);

// Faults: arrays that Python placed against guard pages, so that a fault can be named.
std::string describe_fault(const void* address);

}  // namespace cf::emulate
