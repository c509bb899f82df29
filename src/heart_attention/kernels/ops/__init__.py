"""Everything native beside attention itself: scores, means, nearest centroids, backward, in C and Triton."""
