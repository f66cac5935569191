// Meetings of threads: warp collectives without arithmetic, CTA and cluster barriers, mbarriers,
// register redistribution.
#include "engine.hpp"

namespace cf::emulate {

// --- warp ----------------------------------------------------------------------------------------

uint32_t shuffle(Shuffle kind, uint32_t value, int operand, Where where) {
  struct Argument {
    uint32_t value, result;
    int operand;
  } mine{value, 0, operand};
  warp_rendezvous("shuffle", where, &mine, [kind](void** arguments) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      auto* to = static_cast<Argument*>(arguments[lane]);
      int source = lane;
      switch (kind) {
        case Shuffle::kIndex: source = to->operand & 31; break;
        case Shuffle::kXor: source = lane ^ (to->operand & 31); break;
        case Shuffle::kUp: source = lane - to->operand; break;
        case Shuffle::kDown: source = lane + to->operand; break;
      }
      if (source < 0 || source >= kWarpSize) source = lane;
      to->result = static_cast<Argument*>(arguments[source])->value;
    }
  });
  return mine.result;
}

uint32_t vote_ballot(bool predicate, Where where) {
  struct Argument {
    bool predicate;
    uint32_t result;
  } mine{predicate, 0};
  warp_rendezvous("vote", where, &mine, [](void** arguments) {
    uint32_t ballot = 0;
    for (int lane = 0; lane < kWarpSize; ++lane)
      ballot |= static_cast<uint32_t>(static_cast<Argument*>(arguments[lane])->predicate) << lane;
    for (int lane = 0; lane < kWarpSize; ++lane)
      static_cast<Argument*>(arguments[lane])->result = ballot;
  });
  return mine.result;
}

int warp_uniform(int value, Where where) {
  warp_rendezvous("warp_uniform", where, &value, [](void** arguments) {
    const int first = *static_cast<int*>(arguments[0]);
    for (int lane = 1; lane < kWarpSize; ++lane) {
      const int other = *static_cast<int*>(arguments[lane]);
      if (other != first)
        fail("warp_uniform: lane 0 has %d, lane %d has %d", first, lane, other);
    }
  });
  return value;
}

// The elected lane is lane 0, but any lane under a random schedule.
bool elect_one(Where where) {
  require_architecture(90, 129, "elect.sync", where);
  bool chosen = false;
  warp_rendezvous("elect_one", where, &chosen, [](void** arguments) {
    const int lane = machine.random() ? static_cast<int>(machine.next_random() % kWarpSize) : 0;
    *static_cast<bool*>(arguments[lane]) = true;
  });
  return chosen;
}

static void join_members(Rendezvous& meeting) {
  if (!machine.race) return;
  Clock joined(machine.num_agents, 0);
  for (const Fiber* member : meeting.members)
    if (member != nullptr) join(joined, member->clock);
  for (Fiber* member : meeting.members) {
    if (member == nullptr) continue;
    member->clock = joined;
    ++member->version;
    member->exposed = true;
  }
}

void warp_sync(uint32_t mask, Where where) {
  Fiber& fiber = self();
  Warp& warp = fiber.cta->warps[fiber.warp];
  if ((mask >> fiber.lane & 1) == 0) {
    enter("warp_sync", where);
    fail("lane %d is not in its own warp_sync mask 0x%08x", fiber.lane, mask);
  }
  Rendezvous* meeting = &warp.all;
  if (mask != 0xffffffffu) {
    meeting = nullptr;
    for (auto& partial : warp.partial)
      if (partial->mask == mask) meeting = &partial->rendezvous;
    if (meeting == nullptr) {
      warp.partial.push_back(std::make_unique<Warp::Partial>());
      warp.partial.back()->mask = mask;
      meeting = &warp.partial.back()->rendezvous;
    }
  }
  rendezvous(*meeting, __builtin_popcount(mask), fiber.lane, "warp_sync", where, nullptr,
             [meeting](void**) { join_members(*meeting); });
}

// --- CTA barriers --------------------------------------------------------------------------------

static void release_all(NamedBarrier& barrier) {
  for (Fiber* fiber : barrier.waiting) {
    if (machine.race) learn(*fiber, barrier.clock);
    make_ready(fiber);
  }
  barrier.waiting.clear();
  barrier.count = 0;
  memset(barrier.arrived, 0, sizeof barrier.arrived);
}

// Counts the thread in; true when it completed the barrier.
static bool arrive_at(NamedBarrier& barrier, Fiber& fiber, int id, int threads) {
  if (threads % kWarpSize != 0 || threads < kWarpSize || threads > machine.threads)
    fail("barrier %d of %d threads in a CTA of %d", id, threads, machine.threads);
  if (barrier.count > 0 && barrier.expected != threads) {
    fail("barrier %d: this thread expects %d threads, earlier arrivals %d", id, threads,
         barrier.expected);
  }
  uint64_t& word = barrier.arrived[fiber.tid / 64];
  if (word >> (fiber.tid % 64) & 1)
    fail("barrier %d: the thread arrives twice before the barrier has completed", id);
  word |= 1ull << (fiber.tid % 64);
  barrier.expected = threads;
  if (machine.race) {
    if (barrier.count == 0) std::fill(barrier.clock.begin(), barrier.clock.end(), 0);
    publish(fiber, barrier.clock);
  }
  return ++barrier.count == threads;
}

void barrier_sync(int id, int threads, Where where) {
  Fiber& fiber = enter(id == 0 && threads == 0 ? "cta_sync" : "named barrier sync", where);
  if (id < 0 || id >= kNamedBarriers) fail("there is no barrier %d", id);
  if (threads == 0) threads = machine.threads;
  NamedBarrier& barrier = fiber.cta->named[id];
  if (arrive_at(barrier, fiber, id, threads)) {
    if (machine.race) learn(fiber, barrier.clock);
    release_all(barrier);
    maybe_yield();
    return;
  }
  barrier.waiting.push_back(&fiber);
  fiber.wait_address = id;
  fiber.wait_value = threads;
  park();
}

void barrier_arrive(int id, int threads, Where where) {
  Fiber& fiber = enter("named barrier arrive", where);
  if (id < 0 || id >= kNamedBarriers) fail("there is no barrier %d", id);
  NamedBarrier& barrier = fiber.cta->named[id];
  if (arrive_at(barrier, fiber, id, threads)) release_all(barrier);
  maybe_yield();
}

// --- cluster barrier -----------------------------------------------------------------------------

void cluster_arrive(Where where) {
  require_architecture(90, 119, "barrier.cluster", where);
  Fiber& fiber = enter("cluster_arrive", where);
  if (fiber.cluster_arrived) fail("cluster_arrive twice without cluster_wait");
  fiber.cluster_arrived = true;
  ClusterBarrier& barrier = fiber.cta->cluster->barrier;
  if (machine.race) publish(fiber, barrier.gathered);
  if (++barrier.count == machine.threads * machine.cluster_size) {
    barrier.count = 0;
    ++barrier.generation;
    if (machine.race) barrier.completed = barrier.gathered;
    for (Fiber* waiting : barrier.waiting) {
      if (machine.race) learn(*waiting, barrier.completed);
      make_ready(waiting);
    }
    barrier.waiting.clear();
  }
  maybe_yield();
}

void cluster_wait(Where where) {
  Fiber& fiber = enter("cluster_wait", where);
  if (!fiber.cluster_arrived) fail("cluster_wait without cluster_arrive");
  fiber.cluster_arrived = false;
  ClusterBarrier& barrier = fiber.cta->cluster->barrier;
  if (fiber.cluster_generation++ == barrier.generation) {
    barrier.waiting.push_back(&fiber);
    park();
  } else if (machine.race) {
    learn(fiber, barrier.completed);
  }
  maybe_yield();
}

// --- mbarriers -----------------------------------------------------------------------------------

static constexpr int64_t kMaxBytes = (1 << 20) - 1;

MBarrier& mbarrier_at(saddr address, const char* what) {
  Cta& cta = cta_of(address);
  check_alignment(address, 8, what);
  const uint32_t offset = shared_offset(cta, address, 8);
  const uint16_t index = cta.barrier_at[offset / 8];
  if (index == 0 || !cta.mbarriers[index - 1]->live)
    fail("%s: no mbarrier has been initialised at 0x%x of cta %d", what,
         address & kSharedOffsetMask, cta.index);
  return *cta.mbarriers[index - 1];
}

// Whoever uses a barrier must know of its initialisation.
static void check_initialised(const MBarrier& barrier, saddr address, const Access& access) {
  if (access.agent != barrier.initialiser->agent &&
      access.clock[barrier.initialiser->agent] < barrier.init_time) {
    machine.races.add(Hazard::kWriteRead, barrier.init_site, barrier.initialiser->agent, access,
                      {"an mbarrier (its initialisation)", cta_of(address).index, barrier.offset});
  }
}

// The barrier at an address, for a thread that uses it.
static MBarrier& mbarrier_for(Fiber& fiber, saddr address, const char* what, Where where) {
  MBarrier& barrier = mbarrier_at(address, what);
  if (machine.race) check_initialised(barrier, address, thread_access(fiber, where));
  return barrier;
}

// What an operation knows reaches those who wait for the phase.
static void gather_origin(MBarrier& barrier, saddr address, const Origin& origin) {
  check_initialised(barrier, address, origin.access());
  join(barrier.gathered, *origin.clock);
  barrier.gathered[origin.agent] = std::max(barrier.gathered[origin.agent], origin.time);
}

static void complete_if_done(MBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  barrier.unobserved_copies = barrier.has_copies;
  barrier.has_copies = false;
  if (machine.race) barrier.completed = barrier.gathered;
  const uint32_t parity = (barrier.phase - 1) & 1;
  for (size_t i = 0; i < barrier.waiting.size();) {
    Fiber* fiber = barrier.waiting[i];
    if (fiber->wait_value != parity) {
      ++i;
      continue;
    }
    barrier.unobserved_copies = false;
    if (machine.race) learn(*fiber, barrier.completed);
    if (fiber->polling) {
      fiber->polling = false;
      fiber->poll_result = true;
      auto& pollers = machine.pollers;
      pollers.erase(std::find(pollers.begin(), pollers.end(), fiber));
    }
    make_ready(fiber);
    barrier.waiting.erase(barrier.waiting.begin() + static_cast<ptrdiff_t>(i));
  }
}

static void count_arrivals(MBarrier& barrier, int count, int64_t bytes) {
  ++machine.progress;
  barrier.bytes += bytes;
  if (barrier.bytes > kMaxBytes || barrier.bytes < -kMaxBytes)
    fail("mbarrier 0x%x: transaction count overflow", barrier.offset);
  if (barrier.pending < count) {
    fail("mbarrier 0x%x: %d arrivals where %d of %d are missing (phase %u)", barrier.offset, count,
         barrier.pending, barrier.expected, barrier.phase);
  }
  barrier.pending -= count;
  complete_if_done(barrier);
}

void mbarrier_init(saddr address, int count, Where where) {
  require_architecture(80, 129, "mbarrier", where);
  Fiber& fiber = enter("mbarrier_init", where);
  check_alignment(address, 8, "mbarrier_init");
  Cta& cta = cta_of(address);
  if (&cta != fiber.cta) fail("mbarrier_init of another CTA's barrier");
  if (count < 1 || count > kMaxBytes) fail("mbarrier_init with a count of %d", count);
  const uint32_t offset = shared_offset(cta, address, 8);
  uint16_t& index = cta.barrier_at[offset / 8];
  if (index != 0 && cta.mbarriers[index - 1]->live)
    fail("mbarrier 0x%x is initialised again while in use", offset + kSharedBase);
  if (index == 0) {
    if (static_cast<int>(cta.mbarriers.size()) == cta.num_mbarriers)
      cta.mbarriers.push_back(std::make_unique<MBarrier>());
    index = static_cast<uint16_t>(++cta.num_mbarriers);
  }
  MBarrier& barrier = *cta.mbarriers[index - 1];
  barrier.offset = offset + kSharedBase;
  barrier.expected = barrier.pending = count;
  barrier.bytes = 0;
  barrier.phase = 0;
  barrier.live = true;
  barrier.fenced = barrier.has_copies = barrier.unobserved_copies = false;
  barrier.waiting.clear();
  barrier.initialiser = &fiber;
  if (machine.race) {
    const Access access = thread_access(fiber, where);
    observe_shared(cta, offset, 8, true, access);
    barrier.init_time = access.time;
    barrier.init_site = access.site;
    barrier.gathered.assign(machine.num_agents, 0);
    barrier.completed.assign(machine.num_agents, 0);
  }
}

void mbarrier_invalidate(saddr address, Where where) {
  Fiber& fiber = enter("mbarrier_invalidate", where);
  MBarrier& barrier = mbarrier_for(fiber, address, "mbarrier_invalidate", where);
  if (!barrier.waiting.empty())
    fail("mbarrier 0x%x is invalidated while waited for", barrier.offset);
  barrier.live = false;
}

void mbarrier_fence_init(Where where) {
  require_architecture(90, 129, "fence.mbarrier_init", where);
  Fiber& fiber = enter("fence_mbarrier_init", where);
  for (int i = 0; i < fiber.cta->num_mbarriers; ++i) {
    MBarrier& barrier = *fiber.cta->mbarriers[i];
    if (barrier.initialiser == &fiber) barrier.fenced = true;
  }
}

void mbarrier_arrive(saddr address, int count, uint32_t expected_bytes, Where where) {
  Fiber& fiber = enter("mbarrier_arrive", where);
  MBarrier& barrier = mbarrier_for(fiber, address, "mbarrier_arrive", where);
  if (&cta_of(address) != fiber.cta && !barrier.fenced)
    fail("mbarrier 0x%x of another CTA: its init was not followed by fence_mbarrier_init",
         barrier.offset);
  if (machine.race) publish(fiber, barrier.gathered);
  count_arrivals(barrier, count, expected_bytes);
  maybe_yield();
}

void mbarrier_expect_tx(saddr address, uint32_t bytes, Where where) {
  Fiber& fiber = enter("mbarrier_expect_tx", where);
  count_arrivals(mbarrier_for(fiber, address, "mbarrier_expect_tx", where), 0, bytes);
}

void mbarrier_complete_bytes(saddr address, uint32_t bytes, const Origin& origin) {
  MBarrier& barrier = mbarrier_at(address, "completion of a copy");
  if (!barrier.fenced) {
    fail("mbarrier 0x%x signals copies, but its init was not followed by fence_mbarrier_init or "
         "fence_proxy_async",
         barrier.offset);
  }
  if (machine.race) gather_origin(barrier, address, origin);
  barrier.has_copies = true;
  count_arrivals(barrier, 0, -static_cast<int64_t>(bytes));
}

void mbarrier_complete_arrival(saddr address, const Origin& origin) {
  MBarrier& barrier = mbarrier_at(address, "asynchronous arrival");
  if (machine.race) gather_origin(barrier, address, origin);
  count_arrivals(barrier, 1, 0);
}

// True when the phase of that parity has completed; the thread then knows what led to it.
static bool observe_phase(Fiber& fiber, MBarrier& barrier, uint32_t parity) {
  if ((barrier.phase & 1) == parity) return false;
  barrier.unobserved_copies = false;
  if (machine.race) learn(fiber, barrier.completed);
  return true;
}

static void wait_for_phase(Fiber& fiber, MBarrier& barrier, saddr address, uint32_t parity) {
  barrier.waiting.push_back(&fiber);
  fiber.wait_address = address;
  fiber.wait_value = parity;
  fiber.wait_is_mbarrier = true;
  park();
}

void mbarrier_wait(saddr address, uint32_t parity, Where where) {
  Fiber& fiber = enter("mbarrier_wait", where);
  MBarrier& barrier = mbarrier_for(fiber, address, "mbarrier_wait", where);
  if (parity > 1) fail("mbarrier_wait: a parity of %u", parity);
  if (&cta_of(address) != fiber.cta) fail("mbarrier_wait on another CTA's barrier");
  if (observe_phase(fiber, barrier, parity))
    maybe_yield();
  else
    wait_for_phase(fiber, barrier, address, parity);
}

// May fail spuriously under a random schedule; otherwise sleeps like the hardware's, which suspends
// the thread for a while, and says "not yet" only when nothing else can run.
bool mbarrier_try_wait(saddr address, uint32_t parity, Where where) {
  Fiber& fiber = enter("mbarrier_try_wait", where);
  MBarrier& barrier = mbarrier_for(fiber, address, "mbarrier_try_wait", where);
  if (parity > 1) fail("mbarrier_try_wait: a parity of %u", parity);
  if (&cta_of(address) != fiber.cta) fail("mbarrier_try_wait on another CTA's barrier");
  if (machine.random() && machine.chance(4)) {
    yield();
    return false;
  }
  if (observe_phase(fiber, barrier, parity)) {
    maybe_yield();
    return true;
  }
  fiber.polling = true;
  machine.pollers.push_back(&fiber);
  wait_for_phase(fiber, barrier, address, parity);
  return fiber.poll_result;
}

saddr map_to_cta(saddr address, uint32_t rank, Where where) {
  require_architecture(90, 129, "mapa", where);
  enter("map_to_cta", where);
  if (rank >= static_cast<uint32_t>(machine.cluster_size))
    fail("map_to_cta: rank %u in a cluster of %d", rank, machine.cluster_size);
  return (address & kSharedOffsetMask) | rank << kSharedRankShift;
}

// --- setmaxnreg ----------------------------------------------------------------------------------

// The pool is what the CTA was launched with: warpgroups give back to it and take from it.
void setmaxnreg(int registers, bool increase, Where where) {
  const char* instruction = increase ? "setmaxnreg.inc" : "setmaxnreg.dec";
  require_architecture(90, 119, instruction, where);
  Fiber& fiber = enter(instruction, where);
  Cta& cta = *fiber.cta;
  const int warpgroup = fiber.tid / kWarpgroupSize;
  if ((warpgroup + 1) * kWarpgroupSize > machine.threads)
    fail("setmaxnreg needs a whole warpgroup of 128 threads");
  if (registers < 24 || registers > 256 || registers % 8 != 0)
    fail("setmaxnreg of %d registers: a multiple of 8 from 24 to 256 is wanted", registers);
  int& held = cta.warpgroup_registers[warpgroup];
  rendezvous(cta.warpgroup_meetings[warpgroup], kWarpgroupSize, fiber.tid % kWarpgroupSize,
             instruction, where, &registers, [&](void** arguments) {
               for (int i = 0; i < kWarpgroupSize; ++i)
                 if (*static_cast<int*>(arguments[i]) != registers)
                   fail("setmaxnreg differs inside the warpgroup");
               if (increase ? registers < held : registers > held)
                 fail("%s to %d: the warpgroup holds %d", instruction, registers, held);
               if (increase) return;
               cta.registers_free += (held - registers) * kWarpgroupSize;
               held = registers;
               for (Fiber* waiting : cta.waiting_for_registers) make_ready(waiting);
               cta.waiting_for_registers.clear();
             });
  while (held < registers) {
    const int wanted = (registers - held) * kWarpgroupSize;
    if (cta.registers_free >= wanted) {
      cta.registers_free -= wanted;
      held = registers;
    } else {
      cta.waiting_for_registers.push_back(&fiber);
      park();
    }
  }
}

}  // namespace cf::emulate
