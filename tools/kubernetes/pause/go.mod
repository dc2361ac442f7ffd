module tidegate.dev/tools/kubernetes/pause

go 1.26.0
