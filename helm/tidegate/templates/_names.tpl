{{- define "tidegate.name" -}}
{{- if contains "tidegate" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-tidegate" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "tidegate.selector" -}}
app.kubernetes.io/name: tidegate-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "tidegate.labels" -}}
{{ include "tidegate.selector" . }}
app.kubernetes.io/part-of: tidegate
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "tidegate.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "tidegate.name" .) }}
{{- end }}

{{- define "tidegate.image" -}}
{{- $tag := .image.tag | default (ternary "" .appVersion (not (empty .image.digest))) -}}
{{ .image.repository }}{{ with $tag }}:{{ . }}{{ end }}{{ with .image.digest }}@{{ . }}{{ end }}
{{- end }}

{{/* The arguments that say where the operator acts. */}}
{{- define "tidegate.scope" -}}
{{- if .Values.namespaces.all }}
- --all-namespaces
{{- else }}
{{- range (.Values.namespaces.names | default (list .Release.Namespace)) }}
- --namespace={{ . }}
{{- end }}
{{- end }}
- --operator-namespace={{ .Release.Namespace }}
- --lease={{ include "tidegate.name" . }}
{{- end }}

{{/* The rights of the operator in the namespaces that it serves. tests/operator checks that it needs each right and no other. */}}
{{- define "tidegate.rules" -}}
- apiGroups: [tidegate.dev]
  resources: [servingpools]
  verbs: [get, list, watch, patch]
- apiGroups: [tidegate.dev]
  resources: [servingpools/status]
  verbs: [patch]
# Owner references with blockOwnerDeletion need this right where the cluster checks it, as OpenShift does.
- apiGroups: [tidegate.dev]
  resources: [servingpools/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
# "get" of ConfigMaps also reads the profiles that spec.profilesConfigMapRef names.
- apiGroups: [""]
  resources: [serviceaccounts, configmaps, services]
  verbs: [get, list, watch, create, patch, delete]
# The Secret of each pool: created once, and read by its name. Secrets are never listed, watched or changed.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
{{- if .Values.gatewayApi.enabled }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [llm-d.ai]
  resources: [inferenceobjectives]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
# The addresses of the engines, and why pods do not start.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# Autoscalers that scale the same engines as the operator's own.
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list]
# The progress of downloads of weights.
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}

{{- /* The other release that owns the ServingPool resource of the cluster, as NAMESPACE/NAME; empty if none does. */ -}}
{{- define "tidegate.resourceOwner" -}}
{{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "servingpools.tidegate.dev" -}}
{{- $notes := dig "metadata" "annotations" dict $found -}}
{{- $owner := printf "%s/%s" (get $notes "meta.helm.sh/release-namespace") (get $notes "meta.helm.sh/release-name") -}}
{{- if and $found (ne $owner (printf "%s/%s" .Release.Namespace .Release.Name)) -}}
{{- $owner -}}
{{- end -}}
{{- end -}}

{{- /* A quantity as a number: 512Mi is 536870912, 250m is 0.25. */ -}}
{{- define "tidegate.number" -}}
{{- $powers := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 -}}
{{- $powers = merge $powers (dict "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0) -}}
{{- $unit := regexFind "[mkMGTPEi]+$" (toString .) -}}
{{- mulf (float64 (trimSuffix $unit (toString .))) (get $powers $unit | default 1.0) -}}
{{- end -}}

{{- /* Resources of a container. A request above its limit is an error. `helm lint` ignores `fail`, so the error is no YAML either. */ -}}
{{- define "tidegate.resources" -}}
{{- $limits := .limits | default dict -}}
{{- range $name, $request := .requests -}}
{{- if hasKey $limits $name -}}
{{- $limit := get $limits $name -}}
{{- if gt (float64 (include "tidegate.number" $request)) (float64 (include "tidegate.number" $limit)) -}}
{{- $error := printf "resources.requests.%s is %v, above resources.limits.%s, which is %v: raise the limit" $name $request $name $limit -}}
{{- fail $error -}}
{{- printf "[%s\n" $error -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml . -}}
{{- end -}}
