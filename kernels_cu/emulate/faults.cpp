// Signal handlers of a launch, and the stack that they run on.
#include "faults.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "fiber.hpp"

namespace cf::emulate {

namespace {

constexpr time_t kWatchdogSeconds = 1;
constexpr size_t kHandlerStackBytes = 64 * 1024;

// What the handlers use; one launch runs at a time.
constexpr int kFaults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
constexpr int kNumFaults = 4;
struct sigaction old_actions[kNumFaults];
sigjmp_buf escape_buffer;
bool escape_ready;
uint64_t calls_at_last_tick;

int watchdog_signal() { return SIGRTMIN + 3; }

void* instruction_of(void* context) {
#if defined(__x86_64__)
  return reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#else
  static_cast<void>(context);
  return nullptr;
#endif
}

std::string describe_signal(int signal, const siginfo_t& info) {
  switch (signal) {
    case SIGILL: return "undefined behaviour of the kernel (or a trap instruction)";
    case SIGFPE: return "an integer division by zero";
  }
  if (machine.on_fiber && stacks.in_guard(info.si_addr))
    return format_text("stack overflow of a thread (%zu bytes)", kStackBytes);
  return describe_fault(info.si_addr);
}

// Leaves the handler for the launch's own stack; a running fiber is abandoned where it stands.
void on_fault(int signal, siginfo_t* info, void* context) {
  const std::string text = describe_signal(signal, *info);
  if (machine.on_fiber) {
    machine.fault_at = instruction_of(context);
    fail("%s%s", text.c_str(), machine.acting != nullptr ? "" : "; after the wrapper below");
  }
  if (!escape_ready) {
    for (int i = 0; i < kNumFaults; ++i) sigaction(kFaults[i], &old_actions[i], nullptr);
    return;  // faults again, in the old handler
  }
  try {
    fail("%s", text.c_str());
  } catch (const Failure&) {
    siglongjmp(escape_buffer, 1);
  }
}

void on_watchdog(int, siginfo_t*, void* context) {
  const bool stuck = machine.on_fiber && machine.calls == calls_at_last_tick;
  calls_at_last_tick = machine.calls;
  if (stuck) {
    machine.fault_at = instruction_of(context);
    fail("a thread runs without calling any wrapper for %d s (a spin on a plain load?); after the "
         "wrapper below",
         static_cast<int>(kWatchdogSeconds));
  }
}

}  // namespace

FaultHandlers::FaultHandlers() {
  // Fibers may have no stack left, so faults are handled on one of their own.
  static void* const memory = mmap(nullptr, kHandlerStackBytes, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  stack_t handler_stack{};
  handler_stack.ss_sp = memory;
  handler_stack.ss_size = kHandlerStackBytes;
  sigaltstack(&handler_stack, &old_stack_);

  // SA_NODEFER: the handlers do not return, and the signals must stay unblocked.
  struct sigaction action {};
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  action.sa_sigaction = on_fault;
  for (int i = 0; i < kNumFaults; ++i) sigaction(kFaults[i], &action, &old_actions[i]);
  action.sa_flags |= SA_RESTART;
  action.sa_sigaction = on_watchdog;
  sigaction(watchdog_signal(), &action, &old_watchdog_);
  calls_at_last_tick = ~0ull;
  escape_ready = false;

  sigevent event{};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = watchdog_signal();
  event._sigev_un._tid = static_cast<int>(syscall(SYS_gettid));
  timer_made_ = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_) == 0;
  if (timer_made_) {
    itimerspec period{};
    period.it_interval.tv_sec = kWatchdogSeconds;
    period.it_value = period.it_interval;
    timer_settime(timer_, 0, &period, nullptr);
  }
}

FaultHandlers::~FaultHandlers() {
  if (timer_made_) timer_delete(timer_);
  for (int i = 0; i < kNumFaults; ++i) sigaction(kFaults[i], &old_actions[i], nullptr);
  sigaction(watchdog_signal(), &old_watchdog_, nullptr);
  sigaltstack(&old_stack_, nullptr);
}

sigjmp_buf& FaultHandlers::escape() { return escape_buffer; }
void FaultHandlers::escape_is_set() { escape_ready = true; }

}  // namespace cf::emulate
