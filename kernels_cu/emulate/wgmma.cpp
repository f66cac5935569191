// wgmma: products of a warpgroup that run behind its back.
//
// No thread waits at an issue. Thread t deposits its operands of the warpgroup's i-th wgmma in
// record i; when all 128 have come the operation is pending. Registers of an accumulator are taken
// at its first use (left holding NaN) and given back by the wait that covers its last.
#include <cmath>

#include "numerics.hpp"

namespace cf::emulate {

// An accumulator tile in flight.
struct Flight {
  int n = 0;
  uint32_t last_group = 0;
  std::vector<float> tile;  // [64][n]
  float* registers[kWarpgroupSize] = {};
};

namespace {

constexpr int kWarps = kWarpgroupSize / kWarpSize;

// What the warps know at an issue. Each warp reads its 16 rows of A and all of B, and none waits
// for the others: B is checked against what all four know.
struct WarpClocks {
  ClockPointer of_warp[kWarps];
  ClockPointer of_all;  // the least of the four, by component
};

struct WgmmaOperation final : Operation {
  Cta* cta;
  WgmmaForm form;
  Flight* flight;
  uint64_t a_descriptor, b_descriptor;
  bool accumulate;
  uint32_t group;
  int deposits = 0;
  const uint32_t* a_registers[kWarpgroupSize];
  uint32_t a_values[kWarpgroupSize][4];  // at issue
  // What threads of each warp have learned since the last wgmma, or null.
  std::unique_ptr<Clock> changes[kWarps];
  WarpClocks clocks;
  Agent agent;
  Tick time;
  Site site;

  Access access(const ClockPointer& clock) const {
    return {clock ? clock->data() : nullptr, agent, time, site, false};
  }

  bool step() override;
  const char* when_abandoned() const override { return "a wgmma"; }
};

// Row and column of register i of thread t in an accumulator tile.
int tile_row(int t, int i) { return t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8; }
int tile_column(int t, int i) { return i / 4 * 8 + t % 4 * 2 + i % 2; }

}  // namespace

struct WgmmaQueue {
  Cta* cta;
  int index;
  uint64_t first_record = 0;
  std::deque<std::unique_ptr<WgmmaOperation>> records;  // not yet deposited by all
  OrderedQueue pending;
  std::vector<std::unique_ptr<Flight>> flights;
  struct Issued {
    uint32_t group;
    Tick time;
  };
  std::deque<Issued> issued;  // not covered by a wait
  WarpClocks last_clocks;
  Tick time = 0;
};

std::shared_ptr<WgmmaQueue> make_wgmma_queue(Cta& cta, int index) {
  auto queue = std::make_shared<WgmmaQueue>();
  queue->cta = &cta;
  queue->index = index;
  return queue;
}

void reset_wgmma_queue(WgmmaQueue& queue) {
  queue.first_record = 0;
  queue.records.clear();
  queue.pending.operations.clear();
  queue.pending.listed = false;
  queue.flights.clear();
  queue.issued.clear();
  queue.last_clocks = {};
}

bool WgmmaOperation::step() {
  const int depth = 32 / element_bytes(form.format);
  static float left[64 * 32], right[32 * 256];
  if (form.a_in_registers) {
    const int per_register = 4 / element_bytes(form.format);
    for (int t = 0; t < kWarpgroupSize; ++t) {
      for (int i = 0; i < 4; ++i) {
        if (a_registers[t][i] != a_values[t][i])
          fail("registers of the A operand of a wgmma changed before its wait (thread %d)", t);
        unpack_register(form.format, a_values[t][i],
                        left + (t / 32 * 16 + t % 32 / 4 + i % 2 * 8) * depth +
                            t % 4 * per_register + i / 2 * (depth / 2));
      }
    }
  } else {
    for (int w = 0; w < kWarps; ++w) {
      const Access access = this->access(clocks.of_warp[w]);
      gather_operand(*cta, decode_descriptor_sm90(a_descriptor), form.format, form.a_mn_major,
                     16 * w, 16, depth, {left + 16 * w * depth, depth, 1},
                     machine.race ? &access : nullptr);
    }
  }
  const Access access = this->access(clocks.of_all);
  gather_operand(*cta, decode_descriptor_sm90(b_descriptor), form.format, form.b_mn_major, 0,
                 form.n, depth, {right, 1, form.n}, machine.race ? &access : nullptr);
  float* tile = flight->tile.data();
  if (!accumulate) std::fill(flight->tile.begin(), flight->tile.end(), 0.f);
  multiply(tile, form.n, left, right, 64, form.n, depth);
  return true;
}

// The flight of the accumulator that starts at `d`; the first thread of a record makes it.
static Flight* find_flight(WgmmaQueue& queue, Fiber& fiber, WgmmaOperation& record, float* d,
                           bool first) {
  const int t = fiber.tid % kWarpgroupSize;
  const int count = record.form.n / 2;
  for (auto& [registers, flight] : fiber.flights) {
    if (registers == d) {
      if (flight->n != record.form.n) fail("wgmma with another N on an accumulator in flight");
      if (!first && record.flight != flight)
        fail("wgmma: the accumulators of the threads do not correspond");
      return flight;
    }
    if (d < registers + flight->n / 2 && registers < d + count)
      fail("wgmma on part of an accumulator that is in flight");
  }
  if (first) {
    queue.flights.push_back(std::make_unique<Flight>());
    record.flight = queue.flights.back().get();
    record.flight->n = record.form.n;
    record.flight->tile.assign(static_cast<size_t>(64) * record.form.n, NAN);
  }
  Flight* flight = record.flight;
  if (flight->registers[t] != nullptr)
    fail("wgmma: the accumulators of the threads do not correspond");
  flight->registers[t] = d;
  for (int i = 0; i < count; ++i) {
    flight->tile[tile_row(t, i) * flight->n + tile_column(t, i)] = d[i];
    d[i] = NAN;
  }
  fiber.flights.push_back({d, flight});
  return flight;
}

static void update_clocks(WarpClocks& clocks, std::unique_ptr<Clock> (&changes)[kWarps]) {
  bool changed = false;
  for (int w = 0; w < kWarps; ++w) {
    if (changes[w] == nullptr) continue;
    if (clocks.of_warp[w] != nullptr) join(*changes[w], *clocks.of_warp[w]);
    clocks.of_warp[w] = ClockPointer(std::move(changes[w]));
    changed = true;
  }
  if (!changed) return;
  Clock least = *clocks.of_warp[0];
  for (int w = 1; w < kWarps; ++w)
    for (size_t i = 0; i < least.size(); ++i)
      least[i] = std::min(least[i], (*clocks.of_warp[w])[i]);
  clocks.of_all = std::make_shared<const Clock>(std::move(least));
}

void wgmma(const WgmmaForm& form, float* d, const uint32_t* a_registers, uint64_t a_descriptor,
           uint64_t b_descriptor, bool accumulate, Where where) {
  require_architecture(90, 90, "wgmma", where);
  Fiber& fiber = enter("wgmma", where);
  WgmmaQueue& queue = *fiber.cta->warpgroups[fiber.tid / kWarpgroupSize];
  const int t = fiber.tid % kWarpgroupSize;
  if (form.n % 8 != 0 || form.n < 8 || form.n > 256) fail("wgmma with N %d", form.n);
  if (element_bytes(form.format) == 1 && (form.a_mn_major || form.b_mn_major))
    fail("wgmma: 8-bit operands must be K-major");
  if (!fiber.wgmma_fenced)
    fail("wgmma without wgmma_fence since its registers were last the thread's own");

  const uint64_t index = fiber.wgmma_issued++ - queue.first_record;
  const bool first = index == queue.records.size();
  if (first) {
    queue.records.push_back(std::make_unique<WgmmaOperation>());
    WgmmaOperation& record = *queue.records.back();
    record.cta = fiber.cta;
    record.form = form;
    record.a_descriptor = a_descriptor;
    record.b_descriptor = b_descriptor;
    record.accumulate = accumulate;
    record.group = fiber.wgmma_groups;
    record.where = where;
  }
  WgmmaOperation& record = *queue.records[index];
  if (record.where.line != where.line || record.form.n != form.n) {
    fail("divergent collective: another thread of the warpgroup issued the wgmma at %s here",
         describe(record.where).c_str());
  }
  if (record.b_descriptor != b_descriptor || record.a_descriptor != a_descriptor)
    fail("wgmma: the descriptors differ across the warpgroup");
  if (record.accumulate != accumulate || record.group != fiber.wgmma_groups)
    fail("wgmma: scale-d or the number of earlier commits differ across the warpgroup");
  record.flight = find_flight(queue, fiber, record, d, first);
  record.flight->last_group = record.group;
  record.a_registers[t] = a_registers;
  if (form.a_in_registers) memcpy(record.a_values[t], a_registers, sizeof record.a_values[t]);
  if (machine.race && fiber.wgmma_version != fiber.version) {
    std::unique_ptr<Clock>& changes = record.changes[t / kWarpSize];
    if (changes == nullptr) changes = std::make_unique<Clock>(machine.num_agents, 0);
    publish(fiber, *changes);
    fiber.wgmma_version = fiber.version;
  }
  fiber.exposed = true;
  if (++record.deposits < kWarpgroupSize) {
    maybe_yield();
    return;
  }

  std::unique_ptr<WgmmaOperation> complete = std::move(queue.records.front());
  queue.records.pop_front();
  ++queue.first_record;
  ++machine.counters.mma;
  if (machine.race) {
    update_clocks(queue.last_clocks, complete->changes);
    complete->clocks = queue.last_clocks;
    complete->agent = warpgroup_agent(*fiber.cta, queue.index);
    complete->time = ++queue.time;
    complete->site = machine.sites.intern(where);
  }
  queue.issued.push_back({complete->group, queue.time});
  issue_ordered(queue.pending, std::move(complete), where);
}

void wgmma_fence(Where where) {
  require_architecture(90, 90, "wgmma.fence", where);
  enter("wgmma_fence", where).wgmma_fenced = true;
}

void wgmma_commit(Where where) {
  require_architecture(90, 90, "wgmma.commit_group", where);
  ++enter("wgmma_commit", where).wgmma_groups;
}

// Gives the registers of finished accumulators back.
static void land_flights(WgmmaQueue& queue, uint32_t covered) {
  for (size_t f = 0; f < queue.flights.size();) {
    Flight& flight = *queue.flights[f];
    if (flight.last_group >= covered) {
      ++f;
      continue;
    }
    for (int t = 0; t < kWarpgroupSize; ++t) {
      float* d = flight.registers[t];
      for (int i = 0; i < flight.n / 2; ++i)
        d[i] = flight.tile[tile_row(t, i) * flight.n + tile_column(t, i)];
      Fiber& fiber = queue.cta->fibers[queue.index * kWarpgroupSize + t];
      auto& flights = fiber.flights;
      flights.erase(std::find_if(flights.begin(), flights.end(),
                                 [&](const auto& entry) { return entry.second == &flight; }));
      fiber.wgmma_fenced = false;
    }
    queue.flights.erase(queue.flights.begin() + static_cast<ptrdiff_t>(f));
  }
}

void wgmma_wait(int pending, Where where) {
  require_architecture(90, 90, "wgmma.wait_group", where);
  Fiber& fiber = self();
  WgmmaQueue& queue = *fiber.cta->warpgroups[fiber.tid / kWarpgroupSize];
  rendezvous(
      fiber.cta->warpgroup_meetings[queue.index], kWarpgroupSize, fiber.tid % kWarpgroupSize,
      "wgmma_wait", where, &fiber, [&](void** arguments) {
        const uint32_t groups = fiber.wgmma_groups;
        for (int t = 0; t < kWarpgroupSize; ++t) {
          const auto& other = *static_cast<Fiber*>(arguments[t]);
          if (other.wgmma_groups != groups || other.wgmma_issued != fiber.wgmma_issued)
            fail("wgmma_wait: threads of the warpgroup have issued or committed different work");
        }
        const uint32_t keep = static_cast<uint32_t>(pending);
        const uint32_t covered = groups > keep ? groups - keep : 0;
        auto& operations = queue.pending.operations;
        while (!operations.empty() &&
               static_cast<WgmmaOperation&>(*operations.front()).group < covered) {
          run_front(queue.pending);
        }
        Tick time = 0;
        while (!queue.issued.empty() && queue.issued.front().group < covered) {
          time = queue.issued.front().time;
          queue.issued.pop_front();
        }
        if (machine.race && time != 0) {
          const Agent agent = warpgroup_agent(*fiber.cta, queue.index);
          for (int t = 0; t < kWarpgroupSize; ++t)
            learn(*static_cast<Fiber*>(arguments[t]), agent, time);
        }
        land_flights(queue, covered);
      });
}

void check_wgmma_exit(Fiber& fiber) {
  if (!fiber.flights.empty()) fail("the thread exits with wgmma that no wait has covered");
}

}  // namespace cf::emulate
