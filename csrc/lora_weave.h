// A step's adapters between the tiles of the linear layer that they change: the memory that they
// read is fetched while tiles are computed. On one thread. No torch in here.
//
// The work is a list of items in a fixed order: first every segment's shrink, which needs inputs
// alone, then the expands, a block of outputs after the other and in it segment after segment. An
// expand waits until the layer's outputs of its block are there. Each item reads memory of one
// piece, or of a few. Before a group of tiles an equal share of what is left is planned, so that it
// is fetched meanwhile, and is run after it.
//
// The bits are those of lora(): each output's chain and the order of segments are the same.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "companion.h"
#include "lora.h"

namespace plait {

class LoraWeave : public Companion {
 public:
  // Whether there is so much to read that fetching it ahead is worth the trouble.
  static bool pays(const LoraArgs& args);

  // Takes up the adapters of a layer that is about to be computed; what args point at must stay
  // until `finish`.
  void begin(const LoraKernels& kernels, const LoraArgs& args, size_t outputs);

  FetchList& ahead(size_t groups_left) override;
  void advance(size_t outputs) override;

  // Whether the layer has taken it along.
  bool is_under_way() const { return num_planned_ > 0; }

  // Runs what is left, once all outputs are there.
  void finish();

  int64_t nanoseconds() const { return nanoseconds_; }

 private:
  struct Item {
    size_t segment;
    bool shrinks;
    size_t begin;  // outputs that it changes, else
    size_t end;
  };

  Item item(size_t index) const;
  size_t plan(const Item& item);
  void plan_range(const char* from, size_t bytes);
  void run(const Item& item);
  void run_until(size_t end);

  LoraKernels kernels_{};
  LoraArgs args_{};
  size_t outputs_ = 0;  // of the layer
  size_t num_items_ = 0;
  size_t num_planned_ = 0;
  size_t num_run_ = 0;
  size_t bytes_left_ = 0;  // that are not planned
  size_t done_ = 0;        // outputs of the layer that are there
  int64_t nanoseconds_ = 0;

  std::vector<size_t> t_at_;  // by segment
  std::vector<float> t_;
  std::vector<float> widened_;
  std::vector<FetchRange> ranges_;
  FetchList fetch_;
};

}  // namespace plait
