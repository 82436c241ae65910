{{- define "headrace.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "headrace.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "headrace.name" .) .Release.Name -}}
{{- printf "%s-operator" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s-operator" .Release.Name (include "headrace.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "headrace.serviceAccountName" -}}
{{- default (include "headrace.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "headrace.selectorLabels" -}}
app.kubernetes.io/name: {{ include "headrace.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "headrace.labels" -}}
{{ include "headrace.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: headrace
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* Image reference from a {repository, tag} and the chart's context. */ -}}
{{- define "headrace.image" -}}
{{- printf "%s:%s" .image.repository (default .context.Chart.AppVersion .image.tag) -}}
{{- end -}}

{{- /* What the operator may do in a namespace that it serves. It makes Roles for gateways that may read pods, so it
       must hold that right itself: it can grant nothing that it does not have. */ -}}
{{- define "headrace.rules" -}}
- apiGroups: [serving.headrace.dev]
  resources: [inferenceclusters]
  verbs: [get, list, watch]
- apiGroups: [serving.headrace.dev]
  resources: [inferenceflips]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [serving.headrace.dev]
  resources: [inferenceclusters/status, inferenceflips/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [podtemplates, services, serviceaccounts]
  verbs: [get, list, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, create, patch, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}
