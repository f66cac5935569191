// What a failed launch says: where, who, and who waits for what.
#include <dlfcn.h>
#include <execinfo.h>

#include <cstdio>
#include <map>

#include "engine.hpp"

namespace cf::emulate {

namespace {

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

// Where in the kernel's library the running fiber is, for emulate.py to look up: the instruction of
// a fault, or the return address nearest to this function that lies in another library.
static std::string kernel_frame() {
  Dl_info library, own;
  if (dladdr(reinterpret_cast<void*>(kernel_frame), &own) == 0) return "";
  void* addresses[16] = {machine.fault_at};
  const int count = machine.fault_at != nullptr ? 1 : backtrace(addresses, 16);
  for (int i = 0; i < count; ++i) {
    if (dladdr(addresses[i], &library) == 0 || library.dli_fbase == own.dli_fbase) continue;
    const auto offset = reinterpret_cast<uintptr_t>(addresses[i]) -
                        reinterpret_cast<uintptr_t>(library.dli_fbase) -
                        (machine.fault_at != nullptr ? 0 : 1);
    return format_text("\n  frame 0x%zx of %s", offset, library.dli_fname);
  }
  return "";
}

void fail(const char* format, ...) {
  char buffer[4096];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  std::string text = buffer + launch_line();
  if (machine.failing_as_a_whole) {
    // The text says who waits where.
  } else if (machine.acting != nullptr) {
    text += "\n  in an asynchronous operation issued at " + describe(machine.acting->where);
  } else if (machine.on_fiber) {
    const Fiber& fiber = self();
    text += format_text("\n  at %s (%s), ", describe(fiber.where).c_str(), fiber.instruction) +
            describe_thread(fiber) + kernel_frame();
  }
  machine.failed = true;
  machine.report = std::move(text);
  if (machine.on_fiber) leave_fiber();
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

// --- reports -------------------------------------------------------------------------------------

std::string describe_agent(Agent agent) {
  if (agent >= machine.first_bulk_agent) {
    return "a bulk copy of " +
           describe_agent(machine.bulk_issuer[agent - machine.first_bulk_agent]);
  }
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

std::string describe_races() {
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
std::string waiting_table() {
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

}  // namespace cf::emulate
