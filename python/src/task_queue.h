// SPDX-License-Identifier: Apache-2.0
// The queue in which a group's operations run. It knows nothing of PyTorch, so that a test of C++ alone can try it.
#ifndef DDP_PYTHON_SRC_TASK_QUEUE_H_
#define DDP_PYTHON_SRC_TASK_QUEUE_H_

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace ddp_torch {

// Runs the tasks of one group in the order of Submit: in a thread of its own, or in one that waits for a later task.
// Calls of libddp happen in this order too. A task is referred to by a `Pointer`, may own the queue, and has
//   - HasCall(): it has a call of libddp that can be issued before its turn
//   - Issue(): makes that call, and sets issued_
//   - Execute(): all of the task, to its end
//   - Complete(): tells whoever waits for it. This may run code of the program, and destroy the queue's other owners
//   - issued_, and executed_, which the queue's mutex guards
template <typename Pointer>
class TaskQueue {
 public:
  TaskQueue() : process_(getpid()), thread_([state = state_] { state->Loop(); }) {}
  ~TaskQueue() { Stop(); }

  // Finishes all tasks. Also where the last owner is a task that the queue's thread has just completed.
  void Stop();

  // `now`: the caller waits, so it is executed at once.
  void Submit(const Pointer& task, bool now);

  // Executes tasks up to this one, and none that follows it, which the other ranks may never begin before the caller
  // goes on.
  template <typename Task>
  void Help(const Task& task) {
    const std::shared_ptr<State> state = state_;
    std::unique_lock<std::mutex> lock(state->mutex);
    while (!task.executed_) {
      if (state->running) {
        state->ended.wait(lock, [&] { return task.executed_ || !state->running; });
      } else if (!state->tasks.empty()) {
        state->RunFirst(lock);
      } else {
        return;
      }
    }
  }

 private:
  // Whoever runs tasks keeps it: the completion of a task may end the queue. After fork the child never frees it, since
  // its copy of the condition variables waits for a thread that the child does not have.
  struct State {
    void RunFirst(std::unique_lock<std::mutex>& lock);  // unlocks it meanwhile
    void Loop();
    void Drain();

    std::mutex mutex;                // guards the members below
    std::condition_variable filled;  // for the queue's thread: there are tasks, or it is to stop
    std::condition_variable ended;   // no thread executes a task
    std::deque<Pointer> tasks;
    bool running = false;  // a thread executes a task
    int not_issued = 0;    // tasks that still have to call libddp
    bool stop = false;
  };

  const std::shared_ptr<State> state_ = std::make_shared<State>();
  const int process_;
  std::thread thread_;
};

template <typename Pointer>
void TaskQueue<Pointer>::Stop() {
  if (process_ != getpid()) {  // after fork there is no thread
    if (thread_.joinable()) thread_.detach();
    return;
  }
  const std::shared_ptr<State> state = state_;
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->stop = true;
  }
  state->filled.notify_all();
  if (!thread_.joinable()) return;
  if (thread_.get_id() != std::this_thread::get_id()) {
    thread_.join();
  } else {
    thread_.detach();
    state->Drain();
  }
}

template <typename Pointer>
void TaskQueue<Pointer>::Submit(const Pointer& task, bool now) {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->not_issued == 0 && task->HasCall()) {
      task->Issue();
    } else {
      ++state_->not_issued;
    }
    state_->tasks.push_back(task);
  }
  if (now) {
    Help(*task);
  } else {
    state_->filled.notify_one();
  }
}

template <typename Pointer>
void TaskQueue<Pointer>::State::RunFirst(std::unique_lock<std::mutex>& lock) {
  const Pointer task = std::move(tasks.front());
  tasks.pop_front();
  const bool late = !task->issued_;
  running = true;
  lock.unlock();
  task->Execute();
  lock.lock();
  running = false;
  task->executed_ = true;
  if (late) --not_issued;
  lock.unlock();
  ended.notify_all();
  // Now that others may execute: what a program has tied to the future may wait for another task.
  task->Complete();
  lock.lock();
}

template <typename Pointer>
void TaskQueue<Pointer>::State::Loop() {
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    filled.wait(lock, [this] { return stop || !tasks.empty(); });
    if (tasks.empty()) return;
    if (running) {
      ended.wait(lock, [this] { return !running; });
    } else {
      RunFirst(lock);
    }
  }
}

template <typename Pointer>
void TaskQueue<Pointer>::State::Drain() {
  std::unique_lock<std::mutex> lock(mutex);
  while (running || !tasks.empty()) {
    if (running) {
      ended.wait(lock, [this] { return !running; });
    } else {
      RunFirst(lock);
    }
  }
}

}  // namespace ddp_torch

#endif  // DDP_PYTHON_SRC_TASK_QUEUE_H_
