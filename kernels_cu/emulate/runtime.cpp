// Launching and scheduling: the life of fibers and clusters.
#include <time.h>

#include <cstdio>

#include "engine.hpp"
#include "faults.hpp"
#include "fiber.hpp"

#if !defined(CF_HAS_UCONTEXT_FIBERS)
asm(R"(
.text
.globl cf_emulate_switch
.hidden cf_emulate_switch
.type cf_emulate_switch, @function
cf_emulate_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cf_emulate_switch, .-cf_emulate_switch
)");
#endif

namespace cf::emulate {

Identity* current = nullptr;
int32_t grid_size = 0;
Machine machine;

Stacks stacks;

namespace {

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

void leave_fiber() {
  void* dropped = nullptr;
  switch_stack(&dropped, machine.main_stack_pointer);
  __builtin_unreachable();
}

// --- scheduling ----------------------------------------------------------------------------------

void make_ready(Fiber* fiber) {
  fiber->parked = false;
  fiber->wait_is_mbarrier = false;
  fiber->wait_value = 0;
  machine.ready.push_back(fiber);
  ++machine.progress;
}

bool advance(Operation& operation) {
  Operation* outer = std::exchange(machine.acting, &operation);
  const bool finished = operation.step();
  machine.acting = outer;
  return finished;
}

bool run_some_operation() {
  Machine& m = machine;
  const size_t total = m.unordered.size() + m.queues.size();
  if (total == 0) return false;
  size_t chosen = 0;
  if (m.random()) {
    chosen = m.next_random() % total;
  } else {
    uint64_t oldest = ~0ull;
    for (size_t i = 0; i < total; ++i) {
      const Operation& operation = i < m.unordered.size()
                                       ? *m.unordered[i]
                                       : *m.queues[i - m.unordered.size()]->operations.front();
      if (operation.sequence < oldest) {
        oldest = operation.sequence;
        chosen = i;
      }
    }
  }
  ++m.progress;
  if (chosen < m.unordered.size()) {
    // The vector may grow while the operation runs; take it out first.
    OperationPointer operation = std::move(m.unordered[chosen]);
    m.unordered.erase(m.unordered.begin() + static_cast<ptrdiff_t>(chosen));
    if (!advance(*operation)) m.unordered.push_back(std::move(operation));
    return true;
  }
  const size_t index = chosen - m.unordered.size();
  OrderedQueue& queue = *m.queues[index];
  if (advance(*queue.operations.front())) {
    queue.operations.pop_front();
    if (queue.operations.empty()) {
      queue.listed = false;
      m.queues[index] = m.queues.back();
      m.queues.pop_back();
    }
  }
  return true;
}

void run_front(OrderedQueue& queue) {
  while (!advance(*queue.operations.front())) {
  }
  queue.operations.pop_front();
  if (!queue.operations.empty() || !queue.listed) return;
  queue.listed = false;
  for (OrderedQueue*& listed : machine.queues) {
    if (listed != &queue) continue;
    listed = machine.queues.back();
    machine.queues.pop_back();
    return;
  }
}

void issue_unordered(OperationPointer operation, Where where) {
  operation->where = where;
  operation->cluster = self().cta->cluster;
  operation->sequence = machine.sequence++;
  ++machine.counters.operations;
  if (machine.early()) {
    while (!advance(*operation)) {
    }
    return;
  }
  machine.unordered.push_back(std::move(operation));
  maybe_yield();
}

void issue_ordered(OrderedQueue& queue, OperationPointer operation, Where where) {
  operation->where = where;
  operation->cluster = self().cta->cluster;
  operation->sequence = machine.sequence++;
  ++machine.counters.operations;
  if (machine.early() && queue.operations.empty()) {
    while (!advance(*operation)) {
    }
    return;
  }
  queue.operations.push_back(std::move(operation));
  if (!queue.listed) {
    queue.listed = true;
    machine.queues.push_back(&queue);
  }
  maybe_yield();
}

// Nothing can run and nothing is pending: threads that only poll see "not yet". False when they
// have been told so several times and nothing came of it.
static bool wake_pollers() {
  Machine& m = machine;
  if (m.pollers.empty()) return false;
  m.fruitless_polls = m.polled_at_progress == m.progress ? m.fruitless_polls + 1 : 0;
  if (m.fruitless_polls > 64) return false;
  std::vector<Fiber*> woken;
  woken.swap(m.pollers);
  for (Fiber* fiber : woken) {
    fiber->polling = false;
    fiber->poll_result = false;
    if (fiber->wait_is_mbarrier) {
      const uint32_t word = ((fiber->wait_address & kSharedOffsetMask) - kSharedBase) / 8;
      auto& waiting = fiber->cta->mbarriers[fiber->cta->barrier_at[word] - 1]->waiting;
      waiting.erase(std::find(waiting.begin(), waiting.end(), fiber));
    }
    make_ready(fiber);
    --m.progress;  // being told "not yet" is none
  }
  m.polled_at_progress = m.progress;
  return true;
}

static size_t choose_ready() {
  Machine& m = machine;
  const size_t count = m.ready.size() - m.ready_head;
  if (m.schedule == Schedule::kRandom) return m.ready_head + m.next_random() % count;
  if (m.schedule == Schedule::kPct) {
    size_t best = m.ready_head;
    for (size_t i = m.ready_head; i < m.ready.size(); ++i)
      if (m.ready[i]->priority > m.ready[best]->priority) best = i;
    return best;
  }
  return m.ready_head;
}

static Fiber* pick() {
  Machine& m = machine;
  for (;;) {
    if (m.random() && m.chance(16)) run_some_operation();
    if (m.ready_head < m.ready.size()) {
      const size_t chosen = choose_ready();
      Fiber* fiber = m.ready[chosen];
      if (m.schedule == Schedule::kPct) {
        m.ready.erase(m.ready.begin() + static_cast<ptrdiff_t>(chosen));
        return fiber;
      }
      std::swap(m.ready[chosen], m.ready[m.ready_head]);
      if (++m.ready_head > 4096 && m.ready_head * 2 > m.ready.size()) {
        m.ready.erase(m.ready.begin(), m.ready.begin() + static_cast<ptrdiff_t>(m.ready_head));
        m.ready_head = 0;
      }
      return fiber;
    }
    if (run_some_operation()) continue;
    if (wake_pollers()) continue;
    m.failing_as_a_whole = true;
    fail("deadlock: no thread can run and nothing is in flight; waiting:%s",
         waiting_table().c_str());
  }
}

static void switch_from(Fiber& from) {
  Machine& m = machine;
  Fiber* next = pick();
  if (next == &from) return;
  m.running = next;
  current = next;
  if ((++m.counters.switches & 1023) == 0) {
    if (m.schedule == Schedule::kPct)
      for (uint64_t point : m.change_points)
        if (point / 1024 == m.counters.switches / 1024) next->priority = m.lowest_priority--;
    if (now() > m.deadline) {
      m.failing_as_a_whole = true;
      fail("time limit of %.0f s passed; threads:%s", m.request->time_limit,
           waiting_table().c_str());
    }
  }
  switch_stack(&from.stack_pointer, next->stack_pointer);
}

void park() {
  self().parked = true;
  switch_from(self());
}

void yield() {
  machine.ready.push_back(&self());
  switch_from(self());
}

void maybe_yield() {
  if (machine.random() && machine.chance(32)) yield();
}

// --- clocks --------------------------------------------------------------------------------------

ClockPointer snapshot(Fiber& fiber) {
  if (fiber.snapshot_version != fiber.version) {
    fiber.snapshot = std::make_shared<const Clock>(fiber.clock);
    fiber.snapshot_version = fiber.version;
  }
  fiber.exposed = true;
  return fiber.snapshot;
}

Origin bulk_origin(Fiber& fiber, Where where) {
  if (!machine.race) return {};
  const uint32_t slot = machine.next_bulk_slot++ % kBulkSlots;
  machine.bulk_issuer[slot] = fiber.agent;
  return {snapshot(fiber), machine.first_bulk_agent + slot, ++machine.bulk_time[slot],
          machine.sites.intern(where)};
}

// warpgroup_agent and pipe_agent: after the two agents of each thread.
Agent warpgroup_agent(const Cta& cta, int warpgroup) {
  const size_t per_cta = cta.warpgroups.size() + kPipesPerCta;
  return static_cast<Agent>(cta.cluster->slot * machine.agents_per_cluster +
                            2 * machine.threads * machine.cluster_size + cta.rank * per_cta +
                            warpgroup);
}
Agent pipe_agent(const Cta& cta, int pipe) {
  return warpgroup_agent(cta, static_cast<int>(cta.warpgroups.size()) + pipe);
}

// --- life cycle ----------------------------------------------------------------------------------

static void finish_cta(Cta& cta) {
  check_tensor_exit(cta);
  for (int i = 0; i < cta.num_mbarriers; ++i) {
    const MBarrier& barrier = *cta.mbarriers[i];
    if (barrier.live && (barrier.unobserved_copies || barrier.has_copies)) {
      fail("the CTA exits with copies into its shared memory that nobody has waited for "
           "(mbarrier 0x%x)",
           barrier.offset);
    }
  }
}

static void fiber_main() {
  Machine& m = machine;
  m.kernel->body(m.request->params);
  Fiber& fiber = self();
  fiber.instruction = "exit";
  check_thread_exit(fiber);
  fiber.done = true;
  ++m.progress;
  Cta& cta = *fiber.cta;
  if (--cta.alive == 0) finish_cta(cta);
  if (--cta.cluster->alive == 0) {
    m.retired = cta.cluster;
    switch_stack(&fiber.stack_pointer, m.main_stack_pointer);
  }
  Fiber* next = pick();
  m.running = next;
  current = next;
  switch_stack(&fiber.stack_pointer, next->stack_pointer);
  __builtin_unreachable();
}

static void start_cta(Cta& cta, int index) {
  Machine& m = machine;
  const int threads = m.threads;
  const uint32_t bytes = static_cast<uint32_t>(m.request->shared_bytes);
  cta.index = index;
  cta.alive = threads;
  // 0xFF is a NaN in every format: what nobody wrote shows.
  cta.generic.assign(bytes, 0xFF);
  cta.async.assign(bytes, 0xFF);
  cta.barrier_at.assign(bytes / 8 + 1, 0);
  cta.num_mbarriers = 0;
  for (NamedBarrier& barrier : cta.named) {
    barrier.count = 0;
    barrier.waiting.clear();
    barrier.clock.assign(m.race ? m.num_agents : 0, 0);
    memset(barrier.arrived, 0, sizeof barrier.arrived);
  }
  cta.warps.clear();
  cta.warps.resize(threads / kWarpSize);
  const int warpgroups = (threads + kWarpgroupSize - 1) / kWarpgroupSize;
  if (static_cast<int>(cta.warpgroups.size()) != warpgroups) {
    cta.warpgroups.clear();
    for (int i = 0; i < warpgroups; ++i) cta.warpgroups.push_back(make_wgmma_queue(cta, i));
  }
  for (auto& queue : cta.warpgroups) reset_wgmma_queue(*queue);
  cta.tensor.clear();
  cta.column_taken.assign(kTensorColumns, 0);
  cta.may_allocate = true;
  for (int i = 0; i < kPipesPerCta; ++i) {
    cta.pipes[i].operations.clear();
    cta.pipes[i].listed = false;
    cta.pipe_owner[i] = nullptr;
  }
  const int per_thread =
      std::min(255, 65536 / (threads * std::max(1, m.kernel->min_blocks))) / 8 * 8;
  cta.warpgroup_registers.assign(warpgroups, per_thread);
  cta.registers_free = 0;
  cta.waiting_for_registers.clear();
  cta.warpgroup_meetings.assign(warpgroups, {});
  if (m.race) {
    cta.shared_shadow.reset(bytes, index);
    cta.tensor_shadow.reset(index);
  }

  if (static_cast<int>(cta.fibers.size()) != threads) cta.fibers = std::vector<Fiber>(threads);
  const size_t first_stack =
      (static_cast<size_t>(cta.cluster->slot) * m.cluster_size + cta.rank) * threads;
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = cta.fibers[t];
    // Clocks keep their storage and the times of agents go on: global memory outlives a cluster.
    Clock clock = std::move(fiber.clock), tensor_clock = std::move(fiber.tensor_clock);
    const Tick async_time = fiber.async_time;
    fiber = Fiber();
    fiber.tid = t;
    fiber.lane = t % kWarpSize;
    fiber.warp = t / kWarpSize;
    fiber.cta = &cta;
    fiber.Identity::cta = index;
    fiber.cta_rank = cta.rank;
    fiber.done = false;
    if (m.random()) fiber.priority = (1u << 20) + static_cast<uint32_t>(m.next_random() >> 44);
    if (m.race) {
      fiber.agent = cta.cluster->slot * m.agents_per_cluster + 2 * (cta.rank * threads + t);
      const Tick time = clock.empty() ? 0 : clock[fiber.agent];
      clock.assign(m.num_agents, 0);
      clock[fiber.agent] = time + 1;
      tensor_clock = clock;
      fiber.clock = std::move(clock);
      fiber.tensor_clock = std::move(tensor_clock);
      fiber.async_time = async_time;
    }
    fiber.stack_pointer = prepare_stack(stacks.top(first_stack + t), fiber_main);
    m.ready.push_back(&fiber);
  }
}

static void start_cluster(Cluster& cluster) {
  Machine& m = machine;
  cluster.resident = true;
  cluster.alive = m.threads * m.cluster_size;
  cluster.barrier = {};
  cluster.barrier.gathered.assign(m.race ? m.num_agents : 0, 0);
  ++m.alive_clusters;
  const int first_cta = m.next_cluster++ * m.cluster_size;
  for (int rank = 0; rank < m.cluster_size; ++rank)
    start_cta(*cluster.ctas[rank], first_cta + rank);
}

// The work that may outlive a cluster's threads (global stores whose shared memory has been read)
// is done now; anything else is an error.
static void retire_cluster(Cluster& cluster) {
  Machine& m = machine;
  m.running = nullptr;
  for (size_t i = 0; i < m.unordered.size();) {
    Operation& operation = *m.unordered[i];
    if (operation.cluster != &cluster) {
      ++i;
      continue;
    }
    const char* meaning = operation.when_abandoned();
    if (meaning != nullptr) {
      fail("the kernel ends with %s in flight, issued at %s", meaning,
           describe(operation.where).c_str());
    }
    OperationPointer taken = std::move(m.unordered[i]);
    m.unordered.erase(m.unordered.begin() + static_cast<ptrdiff_t>(i));
    while (!advance(*taken)) {
    }
  }
  for (size_t i = 0; i < m.queues.size();) {
    OrderedQueue& queue = *m.queues[i];
    if (queue.operations.front()->cluster != &cluster) {
      ++i;
      continue;
    }
    for (const OperationPointer& operation : queue.operations) {
      const char* meaning = operation->when_abandoned();
      if (meaning != nullptr) {
        fail("the kernel ends with %s in flight, issued at %s", meaning,
             describe(operation->where).c_str());
      }
    }
    while (!queue.operations.empty()) {
      while (!advance(*queue.operations.front())) {
      }
      queue.operations.pop_front();
    }
    queue.listed = false;
    m.queues[i] = m.queues.back();
    m.queues.pop_back();
  }
  cluster.resident = false;
  --m.alive_clusters;
}

// --- launching -----------------------------------------------------------------------------------

namespace {

void prepare_machine(const KernelInfo& kernel, const LaunchRequest& request) {
  Machine& m = machine;
  m.kernel = &kernel;
  m.request = &request;
  m.schedule = request.schedule;
  m.race = request.race != 0;
  m.race_global = (request.race & kRaceGlobal) != 0;
  m.random_state = request.seed * 0x9E3779B97F4A7C15ull + 0x2545F4914F6CDD1Dull;
  if (m.random_state == 0) m.random_state = 1;
  for (int i = 0; i < 8; ++i) m.next_random();
  m.counters = {};
  m.calls = m.progress = m.sequence = 0;
  m.deadline = now() + request.time_limit;
  m.failed = m.failing_as_a_whole = false;
  m.fault_at = nullptr;
  m.on_fiber = false;
  m.running = nullptr;
  m.acting = nullptr;
  m.retired = nullptr;
  m.report.clear();
  m.ready.clear();
  m.ready_head = 0;
  m.pollers.clear();
  m.polled_at_progress = ~0ull;
  m.fruitless_polls = 0;
  m.unordered.clear();
  m.queues.clear();
  m.change_points.clear();
  m.lowest_priority = 1u << 19;
  // Launches take from hundreds to millions of switches: points on a scale of powers of 8.
  for (int i = 0; i < request.change_points; ++i)
    m.change_points.push_back(m.next_random() % (2048ull << 3 * i));
  grid_size = request.grid;

  const int window = std::max(1, request.window);
  if (m.threads != kernel.threads || m.cluster_size != kernel.cluster ||
      static_cast<int>(m.slots.size()) != window) {
    m.threads = kernel.threads;
    m.cluster_size = kernel.cluster;
    m.slots.clear();
    for (int slot = 0; slot < window; ++slot) {
      auto cluster = std::make_unique<Cluster>();
      cluster->slot = slot;
      for (int rank = 0; rank < kernel.cluster; ++rank) {
        cluster->ctas.push_back(std::make_unique<Cta>());
        cluster->ctas.back()->cluster = cluster.get();
        cluster->ctas.back()->rank = rank;
      }
      m.slots.push_back(std::move(cluster));
    }
  }
  // A failed launch leaves fibers and their queues behind.
  for (auto& cluster : m.slots) {
    cluster->resident = false;
    for (auto& cta : cluster->ctas) cta->fibers.clear();
  }
  m.next_cluster = 0;
  m.num_clusters = request.grid / kernel.cluster;
  m.alive_clusters = 0;

  const int warpgroups = (kernel.threads + kWarpgroupSize - 1) / kWarpgroupSize;
  m.agents_per_cluster = kernel.cluster * (2 * kernel.threads + warpgroups + kPipesPerCta);
  m.first_bulk_agent = window * m.agents_per_cluster;
  m.num_agents = m.first_bulk_agent + kBulkSlots;
  m.bulk_time.assign(kBulkSlots, 0);
  m.bulk_issuer.assign(kBulkSlots, 0);
  m.next_bulk_slot = 0;
  m.sites.clear();
  m.races.clear();
  m.global_shadow.clear();
  m.released.clear();
}

void check_request(const KernelInfo& kernel, const LaunchRequest& request) {
  if (kernel.threads < 1 || kernel.threads > 1024 || kernel.threads % kWarpSize != 0)
    fail("a CTA of %d threads: the emulator wants a multiple of 32 up to 1024", kernel.threads);
  if (kernel.cluster < 1 || kernel.cluster > 16 || (kernel.cluster > 1 && kernel.architecture < 90))
    fail("a cluster of %d CTAs", kernel.cluster);
  if (request.grid < 1 || request.grid % kernel.cluster != 0)
    fail("a grid of %d CTAs is no multiple of the cluster of %d", request.grid, kernel.cluster);
  const int limit = kernel.architecture >= 90 && kernel.architecture < 120 ? 227 * 1024
                    : kernel.architecture == 80                            ? 163 * 1024
                                                                           : 99 * 1024;
  if (request.shared_bytes < 0 || request.shared_bytes > limit)
    fail("%d bytes of shared memory: sm_%d has %d", request.shared_bytes, kernel.architecture,
         limit);
  if (request.params_bytes != kernel.params_bytes)
    fail("parameters of %llu bytes, the kernel takes %llu",
         static_cast<unsigned long long>(request.params_bytes),
         static_cast<unsigned long long>(kernel.params_bytes));
  if (!stacks.has(static_cast<size_t>(machine.slots.size()) * kernel.cluster * kernel.threads))
    fail("no memory for thread stacks");
}

void run_grid() {
  Machine& m = machine;
  FaultHandlers handlers;
  if (sigsetjmp(handlers.escape(), 0) != 0) throw Failure();
  handlers.escape_is_set();
  for (auto& cluster : m.slots)
    if (m.next_cluster < m.num_clusters) start_cluster(*cluster);
  while (m.alive_clusters > 0) {
    Fiber* next = pick();
    m.running = next;
    current = next;
    m.on_fiber = true;
    switch_stack(&m.main_stack_pointer, next->stack_pointer);
    m.on_fiber = false;
    current = nullptr;
    if (m.failed) throw Failure();
    Cluster& cluster = *m.retired;
    retire_cluster(cluster);
    if (m.next_cluster < m.num_clusters) start_cluster(cluster);
  }
}

}  // namespace

int launch(const KernelInfo& kernel, const LaunchRequest& request) {
  Machine& m = machine;
  prepare_machine(kernel, request);
  stacks.reserve(m.slots.size() * kernel.cluster * kernel.threads);
  try {
    check_request(kernel, request);
    run_grid();
  } catch (const Failure&) {
    m.on_fiber = false;
  }
  if (!m.races.empty()) {
    const std::string races = describe_races();
    m.report = m.failed ? m.report + "\nbefore that:\n" + races : races;
    m.failed = true;
  }
  if (request.counters != nullptr) *request.counters = m.counters;
  if (request.report != nullptr && request.report_bytes > 0)
    snprintf(request.report, request.report_bytes, "%s", m.report.c_str());
  m.unordered.clear();
  m.queues.clear();
  return m.failed ? 1 : 0;
}

}  // namespace cf::emulate