// Mistakes that the simulation can make on purpose, to show that it finds them.
#pragma once

namespace jax_ep::rail {

enum class Fault {
  kNone,
  // Places are overwritten.
  kNoTileCredits,      // a source sends tiles without credits
  kNoMessageCredits,   // a rank sends messages to its node without credits
  kNoRowCredits,       // a rank returns rows without credits
  kNoSumCredits,       // a rail sends sums without credits
  kEarlyTileCredits,   // a rail returns a tile's credits before it has forwarded the tile
  kCreditsInAnyOrder,  // a lane returns credits before those of earlier items
  kCountsInOneBuffer,  // counts of all calls share a buffer
  // Data are read before they have arrived, or not where they are.
  kWordBeforeTile,    // a tile's word may arrive before the tile
  kWordBeforeRow,     // a returned row's word may arrive before the row
  kWordsWithoutLaps,  // words have the same lap in every call
  kWrongPlace,        // sums go to the place after theirs
  kStoredCredits,     // credits are stored, not added, and puts overtake each other
  // Calls do not end.
  kMessagesBeforeCounts,  // a source sends its first tile before the counts
  kTilesBeforeCounts,     // a rail forwards the first tile of each node before it relays the counts
  kForwardNodeByNode,     // a rail forwards all tiles of a node before those of the next one
  kCombineNodeByNode,     // a rail adds up all tiles of a node before those of the next one
  kReceiveInSlotOrder,    // a rank awaits message i of every source before message i + 1
  kReturnSourceBySource,  // a rank returns all rows of a source before those of the next one
  kFreeOrder,             // ranks return the rows of a tile in orders of their own; too few places
  kOwnRowsLast,           // a rail takes its node's rows of its own tokens after other nodes' sums
  // Sums have other bits.
  kRanksBackwards,   // a rail adds its ranks' sums from the last one on
  kNodesNotRounded,  // a node's sum is not rounded, but cut off
  kCount
};

constexpr const char* Name(Fault fault) {
  constexpr const char* kNames[] = {
      "none",
      "no tile credits",
      "no message credits",
      "no row credits",
      "no sum credits",
      "early tile credits",
      "credits in any order",
      "counts in one buffer",
      "word before tile",
      "word before row",
      "words without laps",
      "wrong place",
      "stored credits",
      "messages before counts",
      "tiles before counts",
      "forward node by node",
      "combine node by node",
      "receive in slot order",
      "return source by source",
      "free order in few places",
      "own rows last",
      "ranks backwards",
      "nodes not rounded",
  };
  static_assert(sizeof(kNames) / sizeof(kNames[0]) == static_cast<int>(Fault::kCount));
  return kNames[static_cast<int>(fault)];
}

}  // namespace jax_ep::rail
