// Launching, scheduling, reporting: the life of fibers and clusters.
#include "engine.hpp"
#include "fiber.hpp"

#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>

#include <cstdio>
#include <exception>
#include <map>

#if defined(__x86_64__)
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

namespace {

Stacks stacks;

// Thrown by fail() when no fiber runs.
struct Failure : std::exception {};

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

const char* schedule_name(Schedule schedule) {
  switch (schedule) {
    case Schedule::kEarly: return "early";
    case Schedule::kLate: return "late";
    case Schedule::kRandom: return "random";
    case Schedule::kPct: return "pct";
  }
  return "?";
}

std::string launch_line() {
  std::string text = format_text("\n  kernel %s (sm_%d), schedule %s", machine.kernel->name,
                                 machine.kernel->architecture, schedule_name(machine.schedule));
  if (machine.random())
    text += format_text(", seed %llu", static_cast<unsigned long long>(machine.request->seed));
  return text;
}

std::string describe_thread(const Fiber& fiber) {
  return format_text("cta %d (rank %d), warp %d, lane %d", fiber.cta->index, fiber.cta_rank,
                     fiber.warp, fiber.lane);
}

void leave_with_failure(std::string text) {
  machine.failed = true;
  machine.report = std::move(text);
  void* dropped;
  switch_stack(&dropped, machine.main_stack_pointer);
  __builtin_unreachable();
}

}  // namespace

std::string format_text(const char* format, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

std::string describe(Where where) {
  if (where.file == nullptr) return "the start of the kernel";
  // From the last "kernels_cu/" on, else the name alone.
  const std::string path = where.file;
  size_t start = path.rfind("kernels_cu/");
  if (start == std::string::npos) start = path.rfind('/') + 1;
  return path.substr(start) + ":" + std::to_string(where.line);
}

void fail(const char* format, ...) {
  char buffer[2048];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  std::string text = buffer;
  text += launch_line();
  if (machine.failing_as_a_whole) {
    if (machine.on_fiber) leave_with_failure(std::move(text));
  } else if (machine.acting != nullptr) {
    text += "\n  in an asynchronous operation issued at " + describe(machine.acting->where);
  }
  if (!machine.failing_as_a_whole && machine.on_fiber && machine.running != nullptr) {
    const Fiber& fiber = *machine.running;
    if (machine.acting != nullptr) leave_with_failure(std::move(text));
    text += format_text("\n  at %s (%s), ", describe(fiber.where).c_str(), fiber.instruction) +
            describe_thread(fiber);
    leave_with_failure(std::move(text));
  }
  machine.failed = true;
  machine.report = std::move(text);
  throw Failure();
}

void trap(Where where) {
  enter("trap", where);
  fail("the kernel trapped");
}

void require_architecture(int first, int last, const char* instruction, Where where) {
  const int architecture = machine.kernel->architecture;
  if (architecture >= first && architecture <= last) return;
  enter(instruction, where);
  fail("%s does not exist on sm_%d", instruction, architecture);
}

// --- reports ----------------------------------------------------------------------------------------

std::string describe_agent(Agent agent) {
  if (agent >= machine.first_bulk_agent) return "bulk copy";
  const int in_cluster = static_cast<int>(agent % machine.agents_per_cluster);
  const Cluster& cluster = *machine.slots[agent / machine.agents_per_cluster];
  const int threads = machine.threads * machine.cluster_size;
  if (in_cluster < 2 * threads) {
    const int thread = in_cluster / 2;
    const Cta& cta = *cluster.ctas[thread / machine.threads];
    const int tid = thread % machine.threads;
    return format_text("cta %d (rank %d), warp %d, lane %d%s", cta.index, cta.rank, tid / kWarpSize,
                       tid % kWarpSize, in_cluster % 2 ? " (asynchronous)" : "");
  }
  const int warpgroups = static_cast<int>(cluster.ctas[0]->warpgroups.size());
  const int per_cta = warpgroups + kPipesPerCta;
  const int rest = in_cluster - 2 * threads;
  const Cta& cta = *cluster.ctas[rest / per_cta];
  if (rest % per_cta < warpgroups) {
    return format_text("cta %d (rank %d), wgmma of warpgroup %d", cta.index, cta.rank,
                       rest % per_cta);
  }
  return format_text("cta %d (rank %d), tcgen05 pipe", cta.index, cta.rank);
}

void RaceLog::add(Hazard hazard, Site first_site, Agent first, const Access& second,
                  const CellPlace& place) {
  for (RaceReport& report : reports_) {
    if (report.hazard == hazard && report.first_site == first_site &&
        report.second_site == second.site) {
      ++report.occurrences;
      return;
    }
  }
  if (reports_.size() < 16)
    reports_.push_back({hazard, first_site, second.site, describe_agent(first),
                        describe_agent(second.agent), place, 1});
}

static std::string describe_races() {
  std::string text;
  for (const RaceReport& race : machine.races.reports()) {
    static const char* const kFirst[] = {"write", "write", "read"};
    static const char* const kSecond[] = {"read", "write", "write"};
    const int kind = static_cast<int>(race.hazard);
    if (!text.empty()) text += "\n";
    text += format_text("race on %s at 0x%llx", race.place.memory,
                        static_cast<unsigned long long>(race.place.address));
    if (race.place.cta >= 0) text += format_text(" of cta %d", race.place.cta);
    text += format_text(
        ", %llu time%s: no happens-before edge between\n    %-5s at %s by ",
        static_cast<unsigned long long>(race.occurrences), race.occurrences == 1 ? "" : "s",
        kFirst[kind], describe(machine.sites.where(race.first_site)).c_str());
    text += race.first;
    text += format_text("\n    %-5s at %s by ", kSecond[kind],
                        describe(machine.sites.where(race.second_site)).c_str());
    text += race.second;
  }
  return text + launch_line();
}

void report_divergence(const Rendezvous& meeting, const char* instruction, Where where) {
  for (const Fiber* other : meeting.members) {
    if (other == nullptr) continue;
    fail("divergent collective: lane %d is at %s (%s), this lane at %s (%s)", other->lane,
         describe(meeting.where).c_str(), meeting.instruction, describe(where).c_str(),
         instruction);
  }
  fail("divergent collective");
}

// Who waits where, alike lanes of a warp together.
static std::string waiting_table() {
  std::map<std::string, int> rows;
  for (const auto& cluster : machine.slots) {
    if (!cluster->resident) continue;
    for (const auto& cta : cluster->ctas) {
      for (const Fiber& fiber : cta->fibers) {
        if (fiber.done) continue;
        std::string row = format_text("cta %4d (rank %d) warp %2d  %-22s %s", cta->index, cta->rank,
                                      fiber.warp, fiber.instruction,
                                      describe(fiber.where).c_str());
        if (!fiber.parked) {
          row += "  (could run)";
        } else if (fiber.wait_is_mbarrier) {
          const Cta& owner =
              *cluster->ctas[(fiber.wait_address >> kSharedRankShift) % cluster->ctas.size()];
          const uint32_t offset = fiber.wait_address & kSharedOffsetMask;
          row += format_text("  barrier 0x%x parity %u", offset, fiber.wait_value);
          const uint32_t word = (offset - kSharedBase) / 8;
          if (word < owner.barrier_at.size() && owner.barrier_at[word] != 0) {
            const MBarrier& barrier = *owner.mbarriers[owner.barrier_at[word] - 1];
            row += format_text(": phase %u, %d of %d arrivals missing, %lld bytes missing",
                               barrier.phase, barrier.pending, barrier.expected,
                               static_cast<long long>(barrier.bytes));
          }
        } else if (fiber.wait_value != 0) {
          row += format_text("  barrier %u of %u threads", fiber.wait_address, fiber.wait_value);
        }
        ++rows[row];
      }
    }
  }
  std::string text;
  for (const auto& [row, lanes] : rows) text += format_text("\n    %s  x%d", row.c_str(), lanes);
  return text;
}

// --- scheduling -------------------------------------------------------------------------------------

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

// Nothing can run and nothing is pending: threads that only poll see "not yet". False when they have
// been told so several times and nothing came of it.
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

// --- clocks -----------------------------------------------------------------------------------------

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

// --- life cycle -------------------------------------------------------------------------------------

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
  for (int rank = 0; rank < m.cluster_size; ++rank) start_cta(*cluster.ctas[rank], first_cta + rank);
}

// The work that may outlive a cluster's threads (global stores whose shared memory has been read) is
// done now; anything else is an error.
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

// --- faults and the watchdog ------------------------------------------------------------------------

namespace {

constexpr double kWatchdogSeconds = 1.0;  // of CPU time inside the kernel without a wrapper call

class Signals {
 public:
  Signals() {
    stack_t alternate{};
    static uint8_t* memory = static_cast<uint8_t*>(mmap(nullptr, kAlternateBytes, PROT_READ | PROT_WRITE,
                                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    alternate.ss_sp = memory;
    alternate.ss_size = kAlternateBytes;
    sigaltstack(&alternate, &old_stack_);
    struct sigaction action {};
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    action.sa_sigaction = on_fault;
    sigaction(SIGSEGV, &action, &old_segv_);
    sigaction(SIGBUS, &action, &old_bus_);
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART | SA_ONSTACK;
    action.sa_sigaction = on_watchdog;
    sigaction(watchdog_signal(), &action, &old_watchdog_);
    last_calls_ = ~0ull;
    escape_set_ = false;
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = watchdog_signal();
    event._sigev_un._tid = static_cast<int>(syscall(SYS_gettid));
    timer_made_ = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_) == 0;
    if (timer_made_) {
      itimerspec period{};
      period.it_interval.tv_sec = static_cast<time_t>(kWatchdogSeconds);
      period.it_value = period.it_interval;
      timer_settime(timer_, 0, &period, nullptr);
    }
  }
  ~Signals() {
    if (timer_made_) timer_delete(timer_);
    sigaction(SIGSEGV, &old_segv_, nullptr);
    sigaction(SIGBUS, &old_bus_, nullptr);
    sigaction(watchdog_signal(), &old_watchdog_, nullptr);
    sigaltstack(&old_stack_, nullptr);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // Where a fault goes that an operation causes while no fiber runs.
  static inline sigjmp_buf escape_;
  static inline bool escape_set_;

 private:
  static constexpr size_t kAlternateBytes = 64 * 1024;
  static int watchdog_signal() { return SIGRTMIN + 3; }

  // Leaves the handler for the launch's own stack; the fiber is abandoned where it stands.
  static void on_fault(int signal, siginfo_t* info, void*) {
    if (!machine.on_fiber) {
      if (!escape_set_) {
        sigaction(signal, signal == SIGSEGV ? &old_segv_ : &old_bus_, nullptr);
        return;  // faults again, in the old handler
      }
      machine.failed = true;
      machine.report = describe_fault(info->si_addr) + " by an asynchronous operation" + launch_line();
      siglongjmp(escape_, 1);
    }
    if (stacks.in_guard(info->si_addr)) fail("stack overflow of a thread (%zu bytes)", kStackBytes);
    fail("%s; after the wrapper below", describe_fault(info->si_addr).c_str());
  }
  static void on_watchdog(int, siginfo_t*, void*) {
    const bool stuck = machine.on_fiber && machine.calls == last_calls_;
    last_calls_ = machine.calls;
    if (stuck) {
      fail("a thread runs without calling any wrapper for %.0f s (a spin on a plain load?); after "
           "the wrapper below",
           kWatchdogSeconds);
    }
  }

  static inline struct sigaction old_segv_, old_bus_, old_watchdog_;
  static inline uint64_t last_calls_;
  stack_t old_stack_{};
  timer_t timer_{};
  bool timer_made_ = false;
};

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
  for (int i = 0; i < request.change_points; ++i)
    m.change_points.push_back(m.next_random() % 200000);
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
  m.next_bulk_slot = 0;
  m.sites.clear();
  m.races.clear();
  m.global_shadow.clear();
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
  Signals signals;
  if (sigsetjmp(Signals::escape_, 0) != 0) throw Failure();
  Signals::escape_set_ = true;
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
