// Memory faults and endless loops of kernels, turned into reports.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <time.h>

#include "engine.hpp"

namespace cf::emulate {

// Installs handlers for the time of a launch. A fault (a guard page, a division by zero, a trap
// instruction) ends it, and so does a thread that uses a second of CPU time without calling a
// wrapper. The old handlers come back afterwards.
class FaultHandlers {
 public:
  FaultHandlers();
  ~FaultHandlers();
  FaultHandlers(const FaultHandlers&) = delete;
  FaultHandlers& operator=(const FaultHandlers&) = delete;

  // Where a fault goes that an operation causes while no fiber runs: call sigsetjmp on it.
  sigjmp_buf& escape();
  void escape_is_set();

 private:
  struct sigaction old_watchdog_ {};
  stack_t old_stack_{};
  timer_t timer_{};
  bool timer_made_ = false;
};

}  // namespace cf::emulate
